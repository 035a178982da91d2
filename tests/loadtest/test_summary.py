"""The figures of runs whose figures are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import pytest

from loadtest.plan import TenantPlan
from loadtest.record import Outcome, Record, Tiers
from loadtest.stats.interval import wilson
from loadtest.summary import CacheShare, Cost, Latencies, figures_of, summarize
from policies.slo import Slo
from tests.loadtest.some_records import answer, failure, run_of

PROMISED = (TenantPlan(slo=Slo(ttft_s=0.2, tpot_s=0.1)),)


def test_ten_per_second_of_which_three_are_as_promised_are_a_goodput_of_three() -> None:
    in_time = [answer(150, 50), answer(200, 80), answer(20, 99)]
    late = [answer(250, 50)] * 3 + [answer(150, 120)] * 3 + [answer(300, 300)]

    found = figures_of([*in_time, *late], PROMISED, wall_s=1.0)

    assert found.goodput_rps == 3
    assert found.requests_per_minute == 600
    assert found.attainment == 0.3
    assert (found.attainment_low, found.attainment_high) == wilson(3, 10)


def test_latencies_are_of_whole_answers_in_milliseconds() -> None:
    records = [*[answer(100, 10)] * 9, answer(3000, 10), failure(), failure(first_s=5.0)]

    found = figures_of(records, (), 10.0).latencies

    assert found.ttft_ms is not None
    assert found.tpot_ms is not None
    assert (found.ttft_ms.count, found.ttft_ms.p50) == (10, pytest.approx(100))
    assert found.ttft_ms.mean == pytest.approx(390)
    assert (found.tpot_ms.count, found.tpot_ms.max) == (10, pytest.approx(10))
    assert found.e2e_ms is not None
    assert found.e2e_ms.p50 == pytest.approx(200)


def test_what_a_reader_sees_may_come_later_than_the_first_token() -> None:
    found = figures_of([answer(100, 10, publish_s=0.15, gaps_s=(0.03, 0.07))], (), 1.0).latencies

    assert found.time_to_publish_ms is not None
    assert found.time_to_publish_ms.p50 == pytest.approx(150)
    assert found.inter_token_ms is not None
    assert (found.inter_token_ms.count, found.inter_token_ms.mean) == (2, pytest.approx(50))


def test_rates_and_tokens_count_whole_answers() -> None:
    records = [answer(100), answer(100), failure(Outcome.BROKEN, output_tokens=7)]

    found = figures_of(records, (), wall_s=2.0)

    assert (found.requests, found.prompt_tokens, found.output_tokens) == (3, 200, 22)
    assert (found.output_tokens_per_s, found.requests_per_minute) == (11, 60)
    assert found.outcomes == {Outcome.OK: 2, Outcome.BROKEN: 1}
    assert (found.goodput_rps, found.attainment) == (1, None)


def test_the_cached_share_is_of_the_prompts_that_say_so() -> None:
    records = [
        answer(1, cached_tokens=80, tiers=Tiers(50, 20, 10)),
        answer(1, cached_tokens=0),
        answer(1, prompt_tokens=900),
    ]

    assert figures_of(records, (), 1.0).cache == CacheShare(0.4, 0.5, 0.2, 0.1)
    assert figures_of(records[2:], (), 1.0).cache == CacheShare(None, None, None, None)


def test_costs_are_what_was_charged_and_what_the_machine_costs() -> None:
    records = [answer(1, output_tokens=50, price_nusd=20_000), answer(1, output_tokens=50)]

    found = figures_of(records, (), wall_s=1.0, usd_per_hour=2.0).cost

    assert found.charged_per_request == pytest.approx(20e-6)
    assert found.charged_per_million_output == pytest.approx(0.4)
    assert found.machine_per_request == pytest.approx(2 / 3600 / 2)
    assert found.machine_per_million_output == pytest.approx(5.56, abs=0.005)


def test_without_answers_there_are_no_costs_and_no_latencies() -> None:
    for records in ([], [failure()]):
        found = figures_of(records, PROMISED, wall_s=0.0, usd_per_hour=2.0)

        assert found.cost == Cost(None, None, None, None)
        assert found.latencies == Latencies(None, None, None, None, None)
        assert (found.goodput_rps, found.output_tokens_per_s) == (0, 0)
        assert found.tokens_per_piece is None


def test_tokens_per_piece_is_known_where_pieces_were_noted() -> None:
    in_eleven_pieces = answer(10, 5, gaps_s=(0.005,) * 10)
    in_one_piece = answer(10, output_tokens=9)
    simulated = answer(10, 5)

    def found(*records: Record) -> float | None:
        return figures_of(records, (), 1.0).tokens_per_piece

    assert found(in_eleven_pieces) == 1
    assert found(in_one_piece) == 9
    assert found(in_eleven_pieces, in_one_piece, simulated) == pytest.approx(20 / 12)
    assert found(simulated) is None


def test_parts_are_in_the_order_of_appearance_and_share_the_run_s_time() -> None:
    records = [
        answer(100, 10, tenant="b", label="hit"),
        answer(900, 10, tenant="a", label="cold"),
        answer(100, 10, tenant="b", label="cold"),
        failure(tenant="b", label="cold"),
    ]
    tenants = (TenantPlan("a", slo=Slo(ttft_s=0.5)), TenantPlan("b", slo=Slo(ttft_s=0.5)))

    found = summarize(run_of(records, tenants, wall_s=2.0, usd_per_hour=2.0))

    assert list(found.by_tenant) == ["b", "a"]
    assert list(found.by_label) == ["hit", "cold"]
    assert found.by_tenant["b"] == figures_of([records[0], *records[2:]], tenants, 2.0)
    assert found.by_tenant["a"].attainment == 0
    assert found.by_tenant["b"].goodput_rps == 1
    assert found.whole.goodput_rps == 1
    # The machine's time is not divided among tenants, nor given to each.
    assert found.whole.cost.machine_per_request is not None
    assert found.by_tenant["b"].cost.machine_per_request is None


def test_a_sole_tenant_s_figures_are_the_whole_without_the_machine() -> None:
    records = [answer(100, price_nusd=5)]

    found = summarize(run_of(records, usd_per_hour=2.0))

    assert found.by_tenant == {"loadtest": figures_of(records, (), 1.0)}


def test_reasons_of_failures_are_counted_the_most_frequent_first() -> None:
    records = [
        failure(reason="503: busy"),
        failure(reason="429: slower"),
        failure(reason="429: slower"),
        failure(),
        answer(1, reason="a remark on a whole answer"),
    ]

    assert summarize(run_of(records)).reasons == (("429: slower", 2), ("503: busy", 1))


class _MadeOnDemand(Sequence[Record]):
    """Counts how often each record is made."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.made = 0

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Record]: ...
    def __getitem__(self, at: int | slice) -> Record | Sequence[Record]:
        raise NotImplementedError("a million records are read in order")

    def __iter__(self) -> Iterator[Record]:
        for index in range(self._count):
            self.made += 1
            yield answer(100 + index, 10, index=index)


def test_records_that_are_made_on_demand_are_made_once() -> None:
    records = _MadeOnDemand(20_000)

    found = summarize(run_of(records))

    assert records.made == 20_000
    assert found.whole.latencies.ttft_ms is not None
    assert found.whole.latencies.ttft_ms.p50 == pytest.approx(100 + 19_999 / 2)
