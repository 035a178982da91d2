"""Which figures runs are compared by, and which direction is better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from loadtest.record import Outcome
from loadtest.stats.distribution import Distribution
from loadtest.summary import Figures

ERRORS = "error share"


class Metric(NamedTuple):
    """One figure of a run; `value` is None where no answer gives it. Shares are in per cent, and
    compared by their difference."""

    unit: str
    higher_is_better: bool
    value: Callable[[Figures], float | None]
    share: bool = False


def _of(distribution: Distribution | None, name: Literal["p50", "p95"]) -> float | None:
    if distribution is None:
        return None
    return distribution.p50 if name == "p50" else distribution.p95


def _errors(figures: Figures) -> float | None:
    if not figures.requests:
        return None
    return 100 * (1 - figures.outcomes.get(Outcome.OK, 0) / figures.requests)


def _cached(figures: Figures) -> float | None:
    return None if figures.cache.all is None else 100 * figures.cache.all


METRICS = {
    "TTFT p50": Metric("ms", False, lambda one: _of(one.latencies.ttft_ms, "p50")),
    "TTFT p95": Metric("ms", False, lambda one: _of(one.latencies.ttft_ms, "p95")),
    "TPOT p50": Metric("ms", False, lambda one: _of(one.latencies.tpot_ms, "p50")),
    "TPOT p95": Metric("ms", False, lambda one: _of(one.latencies.tpot_ms, "p95")),
    "end to end p50": Metric("ms", False, lambda one: _of(one.latencies.e2e_ms, "p50")),
    "output": Metric("tokens/s", True, lambda one: one.output_tokens_per_s),
    "goodput": Metric("requests/s", True, lambda one: one.goodput_rps),
    "cached share": Metric("%", True, _cached, share=True),
    "charged price": Metric(
        "USD per million output tokens", False, lambda one: one.cost.charged_per_million_output
    ),
    "machine cost": Metric(
        "USD per million output tokens", False, lambda one: one.cost.machine_per_million_output
    ),
    ERRORS: Metric("%", False, _errors, share=True),
}
"""By what a table calls them, in its order."""
