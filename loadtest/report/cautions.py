"""What a reader of the figures should beware of."""

from __future__ import annotations

from loadtest.record import Outcome, Run
from loadtest.report.quantities import count, counted, figure, percent
from loadtest.stats.distribution import Distribution
from loadtest.summary import Figures, Summary

_FEWEST_BEYOND = 5
"""A percentile with fewer values beyond it says little more than those few do."""
_COARSE_PIECES = 1.5

MEANINGS = {
    Outcome.OK: "answered whole and as asked",
    Outcome.LIMITED: "429, the tenant's own limit",
    Outcome.OVERLOADED: "503, the server's capacity",
    Outcome.REFUSED: "another status than 200",
    Outcome.UNREACHABLE: "no connection",
    Outcome.TIMED_OUT: "no end in time",
    Outcome.BROKEN: "begun and cut off",
    Outcome.WRONG: "answered whole, but not as asked",
}


def warnings(run: Run, summary: Summary) -> list[str]:
    """What makes some of the figures worth less, and the run's own notes."""
    whole = summary.whole
    lines = []
    if run.kind == "simulated":
        lines.append("Simulated: the times are a cost model's, not a server's.")
    if run.client is not None:
        lines += [f"Client: {complaint}" for complaint in run.client.complaints]
    lines += [*_failures(whole), *_few(whole)]
    if whole.tokens_per_piece is not None and whole.tokens_per_piece > _COARSE_PIECES:
        lines.append(
            f"The server sends {figure(whole.tokens_per_piece)} tokens at once on average: times "
            "between tokens are times between such pieces."
        )
    return [*lines, *(f"{note[:1].upper()}{note[1:]}" for note in run.notes)]


def _failures(whole: Figures) -> list[str]:
    failed = {kind: n for kind, n in whole.outcomes.items() if kind is not Outcome.OK and n}
    if not failed:
        return []
    kinds = ", ".join(
        f"{count(number)} {kind.value} ({MEANINGS[kind]})"
        for kind, number in sorted(failed.items(), key=lambda item: -item[1])
    )
    total = sum(failed.values())
    return [
        f"{counted(total, 'request')} ({percent(total / whole.requests)}) failed: {kinds}. "
        "Latencies are of whole answers only."
    ]


def _few(whole: Figures) -> list[str]:
    found = whole.latencies.ttft_ms or whole.latencies.e2e_ms
    if found is None:
        return []
    for name, share in (("p95", 0.95), ("p99", 0.99)):
        if _beyond(found, share) < _FEWEST_BEYOND:
            also = "p95 and p99" if name == "p95" else "p99"
            return [
                f"With {counted(found.count, 'answer')}, fewer than {_FEWEST_BEYOND} lie beyond "
                f"{name}: take {also} as a hint only."
            ]
    return []


def _beyond(found: Distribution, share: float) -> float:
    return found.count * (1 - share) + 1e-9
