"""What to call each of several runs, so that a reader tells them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from loadtest.columns import Columns
from loadtest.record import Run
from loadtest.report.over_time import sent_rate
from loadtest.report.quantities import per_second
from loadtest.summary import Summary, summarize

_SAME_RATE = 1.3
COLOURS = tuple(f"c-{n}" for n in range(1, 7))


@dataclass(frozen=True, slots=True)
class Shown:
    """A run as the page has it: `label` is unlike the other runs', `key` is a name for links.
    `swept`: runs of its name are there at several rates, to be told apart by them."""

    run: Run
    summary: Summary
    columns: Columns
    label: str
    key: str
    rate_rps: float | None
    swept: bool


def shown(runs: Sequence[Run], *, repeated: bool = False) -> list[Shown]:
    """The runs with their figures. Those of one name are told apart by their rates where these
    differ, lowest first, and else numbered; always numbered if they are known to be `repeated`,
    for the rates of random arrivals differ by themselves."""
    columns = [Columns.of(run.records) for run in runs]
    rates = [sent_rate(each) for each in columns]
    names = [run.name for run in runs]
    swept = set() if repeated else _swept(names, rates)
    labels = _labels(names, rates, swept)
    found = [
        Shown(run, summarize(run), each, label, f"run-{number}", rate, run.name in swept)
        for number, (run, each, label, rate) in enumerate(
            zip(runs, columns, labels, rates, strict=True), 1
        )
    ]
    if swept:
        found.sort(key=lambda each: (names.index(each.run.name), each.rate_rps or 0.0))
    return found


def is_sweep(runs: Sequence[Shown]) -> bool:
    """Whether some runs of one name differ in their rates."""
    return any(each.swept for each in runs)


def _swept(names: Sequence[str], rates: Sequence[float | None]) -> set[str]:
    """The names whose rates differ by more than chance would have it."""
    by_name: dict[str, list[float]] = {}
    for name, rate in zip(names, rates, strict=True):
        if rate is not None:
            by_name.setdefault(name, []).append(rate)
    return {name for name, found in by_name.items() if max(found) > _SAME_RATE * min(found)}


def _labels(names: Sequence[str], rates: Sequence[float | None], swept: Set[str]) -> list[str]:
    labels = [
        f"{name} at {per_second(rate)}" if name in swept else name
        for name, rate in zip(names, rates, strict=True)
    ]
    repeated, seen = Counter(labels), Counter[str]()
    for at, label in enumerate(labels):
        seen[label] += 1
        if repeated[label] > 1:
            labels[at] = f"{label} #{seen[label]}"
    return labels
