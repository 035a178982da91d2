"""What the front desk has put on each replica and has not seen the end of, as routing wants it.

As `gateway.dispatch.load`, for a fleet with one gateway.
"""

from __future__ import annotations

from loadtest.simulate.job import SimJob
from policies.answer_lengths import AnswerLengths
from policies.cost import Coefficients
from policies.routing import NOTHING_CACHED, Candidate, Standing
from policies.work_by_priority import WorkByPriority


class Book:
    """One replica's. `detailed`: by class and flow as well, which only matters where there are
    several."""

    __slots__ = (
        "_all_answers",
        "_answers",
        "_candidate",
        "_context_tokens",
        "_cost",
        "_max_running",
        "_pending_tokens",
        "_reuse",
        "_standing",
        "_work",
        "name",
        "running",
        "waiting",
    )

    def __init__(
        self,
        name: str,
        cost: Coefficients,
        max_running: int,
        all_answers: AnswerLengths,
        *,
        detailed: bool,
    ) -> None:
        self.name = name
        self.waiting = 0
        self.running = 0
        self._cost = cost
        self._max_running = max_running
        self._pending_tokens = 0
        self._context_tokens = 0
        self._reuse = 0.0
        self._work = WorkByPriority() if detailed else None
        self._answers = AnswerLengths()
        self._all_answers = all_answers
        self._standing: Standing | None = None
        self._candidate: Candidate | None = None

    def placed(self, job: SimJob, uncached_tokens: int, now_s: float) -> None:
        """A job is sent there."""
        self._wait(job, 1, uncached_tokens, now_s)

    def began(self, job: SimJob, uncached_tokens: int, now_s: float) -> None:
        """It has its first token."""
        self._wait(job, -1, -uncached_tokens, now_s)
        self._run(job, 1)

    def ended(self, job: SimJob, answer_tokens: int) -> None:
        """It has its last one, of so many that were generated there."""
        self._run(job, -1)
        self._answers.add(answer_tokens)
        self._all_answers.add(answer_tokens)

    def set_reuse(self, reuse: float) -> None:
        """The chance that what is pushed out there will be asked for again."""
        if reuse != self._reuse:
            self._reuse = reuse
            self._standing = self._candidate = None

    def standing(self) -> Standing:
        """The same object as long as nothing has changed."""
        standing, work = self._standing, self._work
        if standing is None:
            standing = self._standing = Standing(
                self._pending_tokens,
                self.waiting,
                self.running,
                self._context_tokens,
                self._max_running,
                False,
                () if work is None else work.queued(),
                self._answers.tokens or self._all_answers.tokens,
                self._reuse,
                () if work is None else work.yielding(),
            )
        return standing

    def cold_candidate(self) -> Candidate:
        """The replica as one that has nothing of a prompt."""
        candidate = self._candidate
        if candidate is None:
            candidate = self._candidate = Candidate(
                self.name, self._cost, self.standing(), NOTHING_CACHED
            )
        return candidate

    def _wait(self, job: SimJob, sequences: int, tokens: int, now_s: float) -> None:
        self.waiting += sequences
        self._pending_tokens += tokens
        self._standing = self._candidate = None
        if self._work is not None:
            self._work.wait(sequences, tokens, job.rank.priority, job.flow, job.weight, now_s)

    def _run(self, job: SimJob, sequences: int) -> None:
        self.running += sequences
        self._context_tokens += sequences * job.prompt_tokens
        self._standing = self._candidate = None
        if self._work is not None:
            self._work.run(sequences, job.rank.priority)
