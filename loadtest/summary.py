"""The figures of a run: what its records say, all together, by tenant and by label."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.record import Outcome
from loadtest.stats.distribution import Distribution


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of whole answers only, in milliseconds; None where there were none."""

    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    inter_token_ms: Distribution | None
    e2e_ms: Distribution | None
    time_to_publish_ms: Distribution | None


@dataclass(frozen=True, slots=True)
class CacheShare:
    """Of the prompt tokens of whole answers: the share (0 to 1) that came from the cache, all in
    all and by tier. None: the server does not say."""

    all: float | None
    device: float | None
    dram: float | None
    redis: float | None


@dataclass(frozen=True, slots=True)
class Cost:
    """In US dollars; None where nothing was charged and no price of the machine is known. `charged`
    is what the server said, `machine` what the time of the run cost at `usd_per_hour`, per request
    and per million output tokens of whole answers."""

    charged_per_request: float | None
    charged_per_million_output: float | None
    machine_per_request: float | None
    machine_per_million_output: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a set of records that ended within `wall_s`. `goodput_rps` counts those that kept their
    tenant's promise, `attainment` is their share of all that were sent (None without a promise),
    with the 95 % interval by Wilson's score. `outcomes` counts every outcome that occurred."""

    requests: int
    outcomes: dict[Outcome, int]
    wall_s: float
    latencies: Latencies
    output_tokens_per_s: float
    requests_per_minute: float
    goodput_rps: float
    attainment: float | None
    attainment_low: float | None
    attainment_high: float | None
    prompt_tokens: int
    output_tokens: int
    cache: CacheShare
    cost: Cost
    tokens_per_piece: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A run's figures. `by_tenant` and `by_label` are in the order of first appearance; `reasons`
    are the distinct lines that failures gave, with how often, the most frequent first."""

    whole: Figures
    by_tenant: dict[str, Figures]
    by_label: dict[str, Figures]
    reasons: tuple[tuple[str, int], ...]
