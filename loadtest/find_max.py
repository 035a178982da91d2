"""The largest rate at which the promises hold: found by bracketing, and how surely.

The rate is doubled until it fails (halved, if the first one does) and the gap then narrowed in the
middle, which for rates is the geometric one. What is decided is decided by an interval, not by a
figure: a rate whose runs leave it open is repeated a few times, and then called undecided. So two
gaps are narrowed, the one above the largest rate that surely holds and the one below the smallest
that surely fails; what lies between them takes more requests to tell. The rate that is found is at
last run as often as may be, and has to hold over all its runs.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from loadtest.attainment import promising
from loadtest.plan import TenantPlan
from loadtest.rate_point import Finding, RatePoint, Verdict, judge
from loadtest.record import Run
from loadtest.stopping import StoppedError
from loadtest.tables import Table, number, percent

Measure = Callable[[float, int], Awaitable[Run]]
"""`measure(rate, repetition)` runs one load at that rate; repetitions count from 0 and must differ
in their seeds. Whatever is left of the run before has to have ended when it begins: a measure
returns when the last answer has, and warms the server up, and waits, as it needs to. StoppedError
ends the search with what was found."""

_CONFIDENCE = 0.95
_ENOUGH_COMPLAINTS = 2
_LOWEST = 1 / 64
_HIGHEST = 4096.0
"""How far from the first rate the search goes, in multiples of it."""


@dataclass(frozen=True, slots=True)
class FoundMax:
    """What the search found. `points` are all rates that were measured, the lowest first.

    `tenants` are those with a promise. `repetitions` is how many looks at a rate its intervals
    allow for. A search that is `cut_short` had no runs left before it was done, or was stopped.
    `unit` is what rates are counted in.
    """

    tenants: tuple[TenantPlan, ...]
    precision: float
    repetitions: int
    points: tuple[RatePoint, ...]
    cut_short: bool
    unit: str = "requests/s"

    @property
    def holds(self) -> RatePoint | None:
        """The largest rate that surely holds, below every one that does not."""
        return _holds(self.points)

    @property
    def fails(self) -> RatePoint | None:
        """The smallest rate that surely fails, or that the client was not up to."""
        return _fails(self.points)

    @property
    def rate(self) -> float | None:
        """The answer, per second; None if no rate surely holds."""
        return None if self.holds is None else self.holds.rate

    @property
    def goodput_rps(self) -> float | None:
        """Requests per second that were answered as promised at that rate."""
        return None if self.holds is None else self.holds.figures.goodput_rps

    @property
    def runs(self) -> int:
        """How often was measured."""
        return sum(point.runs for point in self.points)

    def lines(self) -> list[str]:
        """The answer in a sentence, and what a reader has to know beside it."""
        lines = [self._answer(), *self._doubts()]
        if self.cut_short:
            lines.append(f"the search ended after {self.runs} runs, before it was done")
        lines.append(
            f"{self.runs} runs at {len(self.points)} rates; an interval covers the true share with "
            f"95 % at each rate, for up to {self.repetitions} looks at it"
            + (f" and all {len(self.tenants)} tenants" if len(self.tenants) > 1 else "")
        )
        return lines

    def table(self) -> Table:
        """All rates: what holds, and how latency grows."""
        headers = (
            *(self.unit, "verdict", "runs", "requests", "kept %", "95 %", "goodput/s"),
            *("TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms", "TPOT p95 ms"),
        )
        return Table(headers, tuple(map(_row, self.points)))

    def _answer(self) -> str:
        if not self.points:
            return "nothing was measured"
        holds, fails = self.holds, self.fails
        promise = _promise(self.tenants)
        if holds is None:
            lowest = self.points[0]
            at = f"at {_rate(lowest.rate)} {self.unit} {_verdict_words(lowest)}"
            return f"no rate was shown to hold {promise}; {at}"
        found = f"{_rate(holds.rate)} {self.unit} hold {promise} ({holds.why})"
        if fails is None:
            return f"at least {found}; no rate was shown to fail"
        if fails.verdict is Verdict.CLIENT:
            return f"at least {found}; at {_rate(fails.rate)} {_verdict_words(fails)}"
        return f"{found}; at {_rate(fails.rate)} they do not ({fails.why})"

    def _doubts(self) -> list[str]:
        """The undecided rates between the edges."""
        low = 0.0 if self.holds is None else self.holds.rate
        high = math.inf if self.fails is None else self.fails.rate
        return [
            f"at {_rate(point.rate)} {_verdict_words(point)}"
            for point in self.points
            if low < point.rate < high and point.verdict is Verdict.UNDECIDED
        ]


async def find_max(
    measure: Measure,
    *,
    start_rate: float,
    precision: float = 0.05,
    most_runs: int = 30,
    repetitions: int = 3,
    most_errors: float = 0.01,
    highest_rate: float = math.inf,
    unit: str = "requests/s",
    tell: Callable[[str], None],
) -> FoundMax:
    """Search from `start_rate`, until both gaps are within `precision` (0.05: 5 % of the rate) or
    `most_runs` have been made; a rate is run `repetitions` times at most.

    What has to hold is in the runs' tenants: for each that was promised anything, its target share
    of its requests. More than `most_errors` (a share) failed requests are a failure of the rate,
    whatever the targets. Every look at a rate is a chance to be wrong, and so is every tenant:
    intervals are as much wider (C. E. Bonferroni) as leaves 5 % for all of a rate's together.
    `unit` is what `measure` takes its rates in, for words alone.

    Raises ValueError for wrong arguments, or if nothing was promised; what `measure` raises ends
    the search.
    """
    if not 0 < start_rate <= highest_rate or math.isinf(start_rate):
        raise ValueError(f"the search cannot start at a rate of {start_rate:g}")
    if precision <= 0 or min(most_runs, repetitions) < 1 or not 0 <= most_errors < 1:
        raise ValueError("precision, most_runs and repetitions are above 0, most_errors a share")
    search = _Search(measure, repetitions, most_errors, most_runs, unit, tell)
    lowest, highest = start_rate * _LOWEST, min(start_rate * _HIGHEST, highest_rate)
    rate: float | None = start_rate
    with suppress(StoppedError):
        while rate is not None and search.runs_left:
            await search.measure_at(rate)
            rate = next_rate(search.points, precision, lowest, highest)
            # A server that is slow in spells may have had none in a single run.
            rate = search.unconfirmed if rate is None else rate
    return FoundMax(
        tuple(search.tenants), precision, repetitions, tuple(search.points), rate is not None, unit
    )


def next_rate(
    points: Sequence[RatePoint], precision: float, lowest: float, highest: float
) -> float | None:
    """The rate to measure next, from one that was not measured yet; None when there is nothing
    left to find out. `points` are the lowest first, and at least one.

    It looks no further up than the smallest rate that fails. So contradictions cannot keep it
    going: each rate it names halves a gap, on the scale of ratios, or widens the range.
    """
    holds, fails = _holds(points), _fails(points)
    if holds is None:
        first = points[0]
        # Fewer requests a second decide nothing where already too few came to decide anything.
        hopeful = first.verdict is not Verdict.UNDECIDED or first.enough
        if hopeful and first.rate / 2 >= lowest:
            return first.rate / 2
    else:
        above = [point.rate for point in points if point.rate > holds.rate]
        if above and above[0] > holds.rate * (1 + precision):
            return math.sqrt(holds.rate * above[0])
    if fails is None:
        top = points[-1].rate
        return None if top >= highest else min(2 * top, highest)
    below = [point.rate for point in points if point.rate < fails.rate]
    if below and fails.rate > below[-1] * (1 + precision):
        return math.sqrt(below[-1] * fails.rate)
    return None


class _Search:
    """The runs so far: counted, judged, and told of."""

    def __init__(
        self,
        measure: Measure,
        repetitions: int,
        most_errors: float,
        most_runs: int,
        unit: str,
        tell: Callable[[str], None],
    ) -> None:
        self._measure = measure
        self._repetitions = repetitions
        self._most_errors = most_errors
        self._unit = unit
        self._tell = tell
        self._runs: dict[float, list[Run]] = {}
        self._points: dict[float, RatePoint] = {}
        self.runs_left = most_runs
        self.tenants: list[TenantPlan] = []

    @property
    def points(self) -> list[RatePoint]:
        """What is known of each rate, the lowest first."""
        return sorted(self._points.values(), key=lambda one: one.rate)

    @property
    def unconfirmed(self) -> float | None:
        """The largest rate that holds, if it has not been run as often as may be."""
        holds = _holds(self.points)
        return None if holds is None or holds.runs == self._repetitions else holds.rate

    async def measure_at(self, rate: float) -> None:
        """Run at a rate, once more if it was before, until it is decided, or as often as may be;
        there is a run left."""
        runs = self._runs.setdefault(rate, [])
        finding: Finding | None = None
        try:
            while True:
                self.runs_left -= 1
                runs.append(await self._measure(rate, len(runs)))
                self.tenants = promising(runs[0].tenants)
                finding = self._judged(runs)
                self._tell(f"{_rate(rate)} {self._unit}: {finding.verdict} ({finding.why})")
                most = len(runs) == self._repetitions or not self.runs_left
                if most or _settled(finding, len(runs)):
                    break
        finally:
            # Also of a search that is stopped between two runs at this rate.
            if finding is not None:
                self._points[rate] = RatePoint.of(rate, runs, finding)

    def _judged(self, runs: Sequence[Run]) -> Finding:
        looks = self._repetitions * len(self.tenants)
        confidence = 1 - (1 - _CONFIDENCE) / looks
        return judge(runs, confidence=confidence, most_errors=self._most_errors)


def _settled(finding: Finding, runs: int) -> bool:
    """A client may have been disturbed once. Twice, it is not up to the rate."""
    if finding.verdict is Verdict.CLIENT:
        return runs >= _ENOUGH_COMPLAINTS
    return finding.verdict is not Verdict.UNDECIDED


def _fails(points: Sequence[RatePoint]) -> RatePoint | None:
    return next((one for one in points if one.verdict in (Verdict.FAILS, Verdict.CLIENT)), None)


def _holds(points: Sequence[RatePoint]) -> RatePoint | None:
    fails = _fails(points)
    below = [one for one in points if fails is None or one.rate < fails.rate]
    return next((one for one in reversed(below) if one.verdict is Verdict.HOLDS), None)


def _promise(tenants: Sequence[TenantPlan]) -> str:
    if len(tenants) > 1:
        return f"what {len(tenants)} tenants were promised"
    slo = tenants[0].slo
    said = [
        f"{name} ≤ {value * 1e3:g} ms"
        for name, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
        if value is not None
    ]
    return f"{' and '.join(said)} for {slo.target * 100:g} %"


def _verdict_words(point: RatePoint) -> str:
    words = {
        Verdict.HOLDS: "they hold",
        Verdict.FAILS: "they do not hold",
        Verdict.UNDECIDED: "the runs leave it open",
        Verdict.CLIENT: "the client is the limit",
    }
    return f"{words[point.verdict]} ({point.why})"


def _rate(rate: float) -> str:
    return number(rate) if rate >= 1 else f"{rate:.3g}"


def _row(point: RatePoint) -> tuple[str, ...]:
    worst, latencies = point.worst, point.figures.latencies
    times = [
        value
        for one in (latencies.ttft_ms, latencies.tpot_ms)
        for value in ((None, None) if one is None else (one.p50, one.p95))
    ]
    return (
        _rate(point.rate),
        point.verdict.value,
        str(point.runs),
        str(sum(one.requests for one in point.attainments)),
        percent(worst.share).removesuffix(" %"),
        f"{worst.low * 100:.1f}–{worst.high * 100:.1f}",
        number(point.figures.goodput_rps),
        *map(number, times),
    )
