"""What the runs at one rate say: whether the promises hold there, how surely, and if not, why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from loadtest.attainment import Attainment, attained, promising
from loadtest.columns import Columns
from loadtest.record import ClientHealth, Outcome, Run
from loadtest.stats.backlog import Backlog, falls_behind
from loadtest.stats.interval import wilson
from loadtest.summary import Figures, figures_of
from loadtest.tables import percent

_SAID_BY_THE_SERVER = (
    Outcome.LIMITED,
    Outcome.OVERLOADED,
    Outcome.REFUSED,
    Outcome.BROKEN,
    Outcome.WRONG,
)
"""Failures that no slow client brings about."""
_NOT_THE_CLIENT = (Outcome.OK, *_SAID_BY_THE_SERVER)
_NEGLIGIBLE = 0.05


class Verdict(StrEnum):
    """Of a rate. `CLIENT`: the client that measured was not up to it, so nobody knows."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    CLIENT = "client-limited"


class Finding(NamedTuple):
    """What runs at one rate show, with the reason in a line, and each promised tenant's share."""

    verdict: Verdict
    why: str
    attainments: tuple[Attainment, ...]


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One rate, per second as it was measured with, and all that was found there.

    `figures` are of all runs that the client was up to, or, if there is none, of all. `complaints`
    are its lines, of whichever run.
    """

    rate: float
    verdict: Verdict
    why: str
    attainments: tuple[Attainment, ...]
    figures: Figures
    runs: int
    complaints: tuple[str, ...]

    @classmethod
    def of(cls, rate: float, runs: Sequence[Run], finding: Finding) -> RatePoint:
        """Of the same runs as the finding."""
        used = _trusted(runs) or runs
        figures = figures_of(
            used[0].records if len(used) == 1 else chain.from_iterable(run.records for run in used),
            runs[0].tenants,
            sum(run.wall_s for run in used),
            runs[0].usd_per_hour,
        )
        complaints = tuple(dict.fromkeys(_complaints(runs)))
        return cls(rate, *finding, figures, len(runs), complaints)

    @property
    def enough(self) -> bool:
        """Whether so many requests could have shown that the promises hold."""
        return all(one.requests >= one.needed for one in self.attainments)

    @property
    def worst(self) -> Attainment:
        """Of the tenant that is furthest below, or least above, its target."""
        return min(self.attainments, key=lambda one: one.share - one.target)


def judge(runs: Sequence[Run], *, confidence: float, most_errors: float) -> Finding:
    """Pool the runs at a rate and say what they show.

    The rate HOLDS if for every tenant with a promise the whole interval of its attainment is at the
    target or above; it FAILS if one's is below it, if surely more than `most_errors` of the
    requests failed, or if the server falls behind. Runs that the client was not up to count
    only for what the server itself said. Raises ValueError if nothing was promised, or all of
    something, which no number of requests can show.
    """
    trusted = _trusted(runs)
    columns = [Columns.of(run.records) for run in trusted or runs]
    attainments = tuple(
        attained(tenant, columns, confidence) for tenant in promising(runs[0].tenants)
    )
    errors = _too_many_errors(columns, confidence, most_errors, told=not trusted)
    if errors is not None:
        return Finding(Verdict.FAILS, errors, attainments)
    if not trusted:
        return Finding(Verdict.CLIENT, next(_complaints(runs)), attainments)
    if falls_behind(backlog for one in columns if (backlog := Backlog.of(one)) is not None):
        why = "the server does not keep up: ever more is unanswered"
        return Finding(Verdict.FAILS, why, attainments)
    verdict, why = _by_attainment(attainments)
    if verdict is Verdict.HOLDS and (share := _error_share(columns)) > most_errors:
        why = f"{percent(share)} of the requests failed"
        return Finding(Verdict.UNDECIDED, why, attainments)
    return Finding(verdict, why, attainments)


def _trusted(runs: Sequence[Run]) -> list[Run]:
    """Those whose client was up to it."""
    return [run for run in runs if run.client is None or _up_to_it(run, run.client)]


def _up_to_it(run: Run, client: ClientHealth) -> bool:
    """Whether the client has no complaint, or none that could change what is kept: it was late by
    a small part of the tightest promised TTFT only, and no request was lost that it may have lost
    itself. Beside a server on the same cores hardly any client is without a complaint."""
    if not client.complaints:
        return True
    promised_s = [one.slo.ttft_s for one in run.tenants if one.slo.ttft_s is not None]
    late_s = max(client.lag_p99_s, client.late_p99_s)
    if not promised_s or late_s > _NEGLIGIBLE * min(promised_s):
        return False
    lost = [kind for kind in _outcomes([Columns.of(run.records)]) if kind not in _NOT_THE_CLIENT]
    return not lost


def _complaints(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.client is not None:
            yield from run.client.complaints


def _by_attainment(attainments: Sequence[Attainment]) -> tuple[Verdict, str]:
    for one in attainments:
        if one.requests and one.high < one.target:
            return Verdict.FAILS, _said(one, attainments)
    for one in attainments:
        if one.requests < one.needed:
            few = f"it takes {one.needed:,} requests to show {one.target * 100:g} %"
            return Verdict.UNDECIDED, f"{_said(one, attainments)}: {few}"
    for one in attainments:
        if one.low < one.target:
            return Verdict.UNDECIDED, _said(one, attainments) + _dependence(one)
    nearest = min(attainments, key=lambda one: one.low - one.target)
    return Verdict.HOLDS, _said(nearest, attainments)


def _dependence(one: Attainment) -> str:
    """Why many requests do not decide it, if that is why."""
    alone = int(one.requests / one.design_effect)
    if alone >= one.needed:
        return ""
    return (
        f": as they wait for each other, they say as much as {alone:,} that do not, and it takes "
        f"{one.needed:,} to show {one.target * 100:g} %"
    )


def _said(one: Attainment, among: Sequence[Attainment]) -> str:
    return str(one) if len(among) == 1 else f"{one.tenant}: {one}"


def _error_share(runs: Sequence[Columns]) -> float:
    counts = _outcomes(runs)
    total = counts.total()
    return 1 - counts[Outcome.OK] / total if total else 0.0


def _too_many_errors(
    runs: Sequence[Columns], confidence: float, most_errors: float, *, told: bool
) -> str | None:
    """What there is to say if too many requests failed; `told`: only as the server itself said."""
    counts = _outcomes(runs)
    errors = {
        outcome: count
        for outcome, count in counts.items()
        if outcome is not Outcome.OK and (not told or outcome in _SAID_BY_THE_SERVER)
    }
    failed, total = sum(errors.values()), counts.total()
    if not failed or wilson(failed, total, confidence).low <= most_errors:
        return None
    kind = max(errors, key=errors.__getitem__)
    return f"{percent(failed / total)} of the requests failed, most as {kind.value}"


def _outcomes(runs: Sequence[Columns]) -> Counter[Outcome]:
    counts: Counter[Outcome] = Counter()
    for columns in runs:
        for outcome, rows in columns.outcome.groups().items():
            counts[outcome] += len(rows)
    return counts
