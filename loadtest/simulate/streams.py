"""The answers that one replica generates at once: all of them take one token in each step.

So nothing is kept by token. What a stream knows follows from the number of the step that will end
it, which of them needs a page in which step from the step's number modulo a block, and the sum of
their contexts grows by their number.
"""

from __future__ import annotations

from heapq import heappop, heappush

from loadtest.simulate.job import SimJob
from policies.step_budget import Streams


class StreamSet:
    """`steps` is the number of the last step that is over."""

    def __init__(self, block_tokens: int) -> None:
        self.steps = 0
        self.count = 0
        self.context_tokens = 0
        """The sum of what they know."""
        self._block_tokens = block_tokens
        self._ends: list[tuple[int, int, SimJob]] = []
        self._phases = [0] * block_tokens
        """How many take a page in which step."""
        self._targets: dict[float, int] = {}

    def as_one(self) -> Streams:
        """What prompts have to share a step with. All had their last token a moment ago."""
        tightest_s = min(self._targets) if self._targets else None
        return Streams(self.count, self.context_tokens, tightest_s)

    def join(self, job: SimJob) -> None:
        """It generates from the next step on. It has pages for all that it knows but its last
        token."""
        job.end_step = self.steps + job.answer_tokens - job.generated
        # a page is due in the step whose token is the first of a block
        job.phase = (self.steps + 2 - job.known) % self._block_tokens
        self._phases[job.phase] += 1
        self.count += 1
        self.context_tokens += job.known
        heappush(self._ends, (job.end_step, job.rank.arrival, job))
        if job.tpot_s is not None:
            self._targets[job.tpot_s] = self._targets.get(job.tpot_s, 0) + 1

    def leave(self, job: SimJob) -> int:
        """It generates no more. Brings up to date what it knows; how many tokens it has generated
        here."""
        known = self.known(job)
        generated = known - job.known
        job.generated += generated
        job.known = known
        job.end_step = 0
        self._phases[job.phase] -= 1
        self.count -= 1
        self.context_tokens -= known
        if job.tpot_s is not None:
            left = self._targets[job.tpot_s] - 1
            if left:
                self._targets[job.tpot_s] = left
            else:
                del self._targets[job.tpot_s]
        return generated

    def known(self, job: SimJob) -> int:
        """The tokens that one of them knows now."""
        return job.prompt_tokens + job.answer_tokens - (job.end_step - self.steps)

    def advance(self, steps: int) -> list[SimJob]:
        """So many steps are over, none of which but the last ends any of them. Those that it
        ends."""
        self.steps += steps
        self.context_tokens += steps * self.count
        ends, ended = self._ends, []
        while ends and ends[0][0] <= self.steps:
            end_step, _, job = heappop(ends)
            if job.end_step == end_step:  # else it has left meanwhile
                ended.append(job)
        return ended

    def steps_left(self) -> int:
        """Until the first of them ends; there must be one."""
        ends = self._ends
        while ends[0][2].end_step != ends[0][0]:
            heappop(ends)
        return ends[0][0] - self.steps

    def pages(self, first: int, steps: int) -> int:
        """Pages that they take in so many steps, of which the `first`th from now is the first."""
        size, phases = self._block_tokens, self._phases
        whole, rest = divmod(steps, size)
        pages = whole * self.count
        if rest:
            begin = (self.steps + first) % size
            end = begin + rest
            if rest == 1:
                pages += phases[begin]
            elif end <= size:
                pages += sum(phases[begin:end])
            else:
                pages += sum(phases[begin:]) + sum(phases[: end - size])
        return pages

    def check_empty(self) -> None:
        """Raise AssertionError unless nothing is left of those that were here."""
        assert not self.count, "streams are miscounted"
        assert not self.context_tokens, "contexts are miscounted"
        assert not any(self._phases), "pages to come are miscounted"
        assert not self._targets, "a target is nobody's"
