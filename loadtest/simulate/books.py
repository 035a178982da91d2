"""What the front desk has put on each replica and has not seen the end of, as routing wants it.

As `gateway.dispatch.load`, for a fleet with one gateway.
"""

from __future__ import annotations

from loadtest.simulate.job import SimJob
from policies.answer_lengths import AnswerLengths
from policies.arrival_rate import ArrivalRates
from policies.cost import Coefficients
from policies.routing import NOTHING_CACHED, Candidate, Queued, Standing


class Book:
    """One replica's. `detailed`: by class and flow as well, which only matters where there are
    several."""

    __slots__ = (
        "_all_answers",
        "_answers",
        "_arrivals",
        "_candidate",
        "_context_tokens",
        "_cost",
        "_detailed",
        "_max_running",
        "_pending_tokens",
        "_queued",
        "_reuse",
        "_standing",
        "_yielding",
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
        self._queued: dict[tuple[int, bytes], Queued] = {}
        self._arrivals = ArrivalRates()
        self._yielding: dict[int, int] = {}
        self._answers = AnswerLengths()
        self._all_answers = all_answers
        self._detailed = detailed
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
        standing = self._standing
        if standing is None:
            standing = self._standing = Standing(
                self._pending_tokens,
                self.waiting,
                self.running,
                self._context_tokens,
                self._max_running,
                False,
                tuple(self._queued[each] for each in sorted(self._queued)),
                self._answers.tokens or self._all_answers.tokens,
                self._reuse,
                tuple(sorted(self._yielding.items())),
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
        if not self._detailed:
            return
        place = job.rank.priority, job.flow
        before = self._queued.get(place) or Queued(place[0], 0, 0, job.flow, job.weight)
        if before.sequences + sequences:
            self._queued[place] = before._replace(
                sequences=before.sequences + sequences,
                tokens=before.tokens + tokens,
                tokens_per_s=self._arrivals.per_s(place, max(0, tokens), now_s),
            )
        else:
            del self._queued[place]

    def _run(self, job: SimJob, sequences: int) -> None:
        self.running += sequences
        self._context_tokens += sequences * job.prompt_tokens
        self._standing = self._candidate = None
        priority = job.rank.priority
        if self._detailed and priority:
            left = self._yielding.get(priority, 0) + sequences
            if left:
                self._yielding[priority] = left
            else:
                del self._yielding[priority]
