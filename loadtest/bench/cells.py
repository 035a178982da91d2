"""Which figure of which workload is a cell of the tables, and which direction is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from loadtest.bench.measure import PassFigures, Repetition
from loadtest.bench.workloads import ONLY_PASS, Workload
from loadtest.stats.distribution import Distribution


class Cell(NamedTuple):
    """One figure of a repetition; `value` is None where no answer gives it."""

    workload: str
    label: str
    unit: str
    higher_is_better: bool
    value: Callable[[Repetition], float | None]


class Spread(NamedTuple):
    """A figure over several repetitions."""

    low: float
    median: float
    high: float


def cells_of(workload: Workload) -> list[Cell]:
    """The cells of a workload's row: throughput, TTFT and TPOT, or one TTFT for each pass."""
    if workload.passes != (ONLY_PASS,):
        return [
            Cell(workload.name, f"TTFT {name}", "ms", False, _p50(index, _ttft))
            for index, name in enumerate(workload.passes)
        ]
    return [
        Cell(workload.name, "output", "tok/s", True, lambda run: run.output_tokens_per_s),
        Cell(workload.name, "TTFT p50", "ms", False, _p50(0, _ttft)),
        Cell(workload.name, "TPOT p50", "ms", False, _p50(0, _tpot)),
    ]


def spread(cell: Cell, repetitions: Iterable[Repetition]) -> Spread | None:
    """The cell over the repetitions of its workload that have it; None if none has."""
    values = [
        value
        for repetition in repetitions
        if repetition.workload == cell.workload and (value := cell.value(repetition)) is not None
    ]
    return Spread(min(values), median(values), max(values)) if values else None


def lead(cell: Cell, ours: Sequence[Repetition], theirs: Sequence[Repetition]) -> float | None:
    """By what factor `ours` is better, the median over pairs; below 1 it is worse.

    Pairs are formed in order. They ran one right after the other, so that what slows the machine
    for a while slows both sides of a pair, and their ratio holds where their figures drift.
    """
    factors = []
    mine = [one for one in ours if one.workload == cell.workload]
    other = [one for one in theirs if one.workload == cell.workload]
    for left, right in zip(mine, other, strict=True):
        a, b = cell.value(left), cell.value(right)
        if a and b:
            factors.append(a / b if cell.higher_is_better else b / a)
    return median(factors) if factors else None


def _p50(
    index: int, of: Callable[[PassFigures], Distribution | None]
) -> Callable[[Repetition], float | None]:
    def value(repetition: Repetition) -> float | None:
        distribution = of(repetition.passes[index])
        return None if distribution is None else distribution.p50

    return value


def _ttft(figures: PassFigures) -> Distribution | None:
    return figures.ttft_ms


def _tpot(figures: PassFigures) -> Distribution | None:
    return figures.tpot_ms
