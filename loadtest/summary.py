"""The figures of a run: what its records say, all together, by tenant and by label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from loadtest.columns import Columns, Floats, Rows
from loadtest.plan import TenantPlan
from loadtest.record import Outcome, Record, Run
from loadtest.stats.cost import usd_per_million_tokens, usd_per_unit
from loadtest.stats.distribution import Distribution
from loadtest.stats.goodput import Goodput
from policies.pricing import NUSD


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
    """In US dollars, per request and per million output tokens of whole answers. `charged` is what
    the server said, over the answers for which it did, and None where it never did. `machine` is
    what the time of the run cost at `usd_per_hour`, and None without that or for a part of a run: a
    machine's time is not divided among those who used it together."""

    charged_per_request: float | None
    charged_per_million_output: float | None
    machine_per_request: float | None
    machine_per_million_output: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a set of records that ended within `wall_s`. `goodput_rps` counts those that kept their
    tenant's promise, `attainment` is their share of all that were sent (None without a promise),
    with the 95 % interval by Wilson's score. `outcomes` counts every outcome that occurred.

    Tokens, tokens per second and requests per minute are those of whole answers.
    `tokens_per_piece` is how many tokens an answer's piece had on average, None if the pieces are
    not known: where it is above 1, inter-token times are the times between pieces.
    """

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


def summarize(run: Run) -> Summary:
    """All figures of a run."""
    columns = Columns.of(run.records)
    whole = _figures(columns, run.tenants, run.wall_s, run.usd_per_hour)

    def of_part(rows: Rows) -> Figures:
        if len(rows) == len(columns):
            return replace(whole, cost=_without_machine(whole.cost))
        return _figures(columns.take(rows), run.tenants, run.wall_s, None)

    return Summary(
        whole,
        {name: of_part(rows) for name, rows in columns.tenant.groups().items()},
        {name: of_part(rows) for name, rows in columns.label.groups().items()},
        _reasons(columns),
    )


def figures_of(
    records: Iterable[Record],
    tenants: Iterable[TenantPlan],
    wall_s: float,
    usd_per_hour: float | None = None,
) -> Figures:
    """The figures of records that ended within `wall_s`. A tenant that is not among `tenants` was
    promised nothing."""
    return _figures(Columns.of(records), tenants, wall_s, usd_per_hour)


def _figures(
    columns: Columns, tenants: Iterable[TenantPlan], wall_s: float, usd_per_hour: float | None
) -> Figures:
    answers = columns.take(np.flatnonzero(columns.ok))
    goodput = Goodput.of(columns, tenants)
    output_tokens = int(answers.output_tokens.sum())
    output_tokens_per_s = _per(output_tokens, wall_s)
    answers_per_s = _per(len(answers), wall_s)
    return Figures(
        requests=len(columns),
        outcomes={name: len(rows) for name, rows in columns.outcome.groups().items()},
        wall_s=wall_s,
        latencies=_latencies(answers),
        output_tokens_per_s=output_tokens_per_s,
        requests_per_minute=answers_per_s * 60,
        goodput_rps=_per(goodput.kept, wall_s),
        attainment=goodput.attainment,
        attainment_low=None if goodput.interval is None else goodput.interval.low,
        attainment_high=None if goodput.interval is None else goodput.interval.high,
        prompt_tokens=int(answers.prompt_tokens.sum()),
        output_tokens=output_tokens,
        cache=_cache_share(answers),
        cost=_cost(answers, answers_per_s, output_tokens_per_s, usd_per_hour),
        tokens_per_piece=_tokens_per_piece(answers),
    )


def _latencies(answers: Columns) -> Latencies:
    return Latencies(
        _in_ms(answers.ttft_s),
        _in_ms(answers.tpot_s),
        _in_ms(answers.gaps_s),
        _in_ms(answers.e2e_s),
        _in_ms(answers.time_to_publish_s),
    )


def _in_ms(values_s: Floats) -> Distribution | None:
    return Distribution.of(values_s[~np.isnan(values_s)] * 1e3)


def _per(count: float, wall_s: float) -> float:
    """A run of no length, as one of no requests is, did nothing per second."""
    return count / wall_s if wall_s > 0 else 0.0


def _cache_share(answers: Columns) -> CacheShare:
    return CacheShare(
        *(
            _share_of_prompts(tokens, answers)
            for tokens in (
                answers.cached_tokens,
                answers.device_tokens,
                answers.dram_tokens,
                answers.redis_tokens,
            )
        )
    )


def _share_of_prompts(tokens: Floats, answers: Columns) -> float | None:
    known = ~np.isnan(tokens)
    prompts = int(answers.prompt_tokens[known].sum())
    return float(tokens[known].sum()) / prompts if prompts else None


def _cost(
    answers: Columns, answers_per_s: float, output_tokens_per_s: float, usd_per_hour: float | None
) -> Cost:
    charged = ~np.isnan(answers.price_nusd)
    usd = float(answers.price_nusd[charged].sum()) / NUSD
    tokens = int(answers.output_tokens[charged].sum())
    cost = Cost(
        charged_per_request=usd / int(charged.sum()) if charged.any() else None,
        charged_per_million_output=usd / tokens * 1e6 if tokens else None,
        machine_per_request=None,
        machine_per_million_output=None,
    )
    if usd_per_hour is None or not answers_per_s:
        return cost
    return replace(
        cost,
        machine_per_request=usd_per_unit(usd_per_hour, answers_per_s),
        machine_per_million_output=(
            usd_per_million_tokens(usd_per_hour, output_tokens_per_s)
            if output_tokens_per_s
            else None
        ),
    )


def _without_machine(cost: Cost) -> Cost:
    return replace(cost, machine_per_request=None, machine_per_million_output=None)


def _tokens_per_piece(answers: Columns) -> float | None:
    # An answer without gaps came in one piece, unless its last token is later than its first: then
    # nobody noted its pieces, as in a simulation.
    known = (answers.gap_counts > 0) | (answers.last_s == answers.first_s)
    pieces = int((answers.gap_counts[known] + 1).sum())
    return int(answers.output_tokens[known].sum()) / pieces if pieces else None


def _reasons(columns: Columns) -> tuple[tuple[str, int], ...]:
    """A whole answer has no reason to give."""
    failed = columns.reason[np.flatnonzero(~columns.ok)]
    counts = {name: len(rows) for name, rows in failed.groups().items() if name is not None}
    return tuple(Counter(counts).most_common())
