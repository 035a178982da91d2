"""Tables, leads, notes and JSON from known figures."""

from __future__ import annotations

import orjson
import pytest

from loadtest.bench.campaign import Report
from loadtest.bench.cells import cells_of, lead, spread
from loadtest.bench.closed_loop import LoopOutcome
from loadtest.bench.completion import Completion, Failure
from loadtest.bench.gateway_cost import GatewayCost, LoopLag
from loadtest.bench.measure import Repetition, sum_up
from loadtest.bench.report import as_json, figures, gateway_note, gateway_table, leads, notes
from loadtest.bench.workloads import W1, W4
from loadtest.stats.distribution import Distribution
from loadtest.tables import Table, number


def w1(ttft_ms: float, tpot_ms: float, wall_s: float, cached: int | None = 0) -> Repetition:
    one = Completion("all", ttft_ms / 1e3, tpot_ms / 1e3, 1.0, 128, 128, cached, 64, "")
    return sum_up(W1, 0, LoopOutcome((one,), wall_s))


def w4(cold_ms: float, hit_ms: float) -> Repetition:
    cold = Completion("cold", cold_ms / 1e3, 0.01, 1.0, 1024, 8, 0, 8, "")
    hit = Completion("hit", hit_ms / 1e3, 0.01, 1.0, 1024, 8, 1008, 8, "")
    return sum_up(W4, 0, LoopOutcome((cold, hit), 1.0))


OURS = Report("ours", "m", (w1(40, 8, 1.0), w1(50, 10, 2.0), w4(300, 10)), 1_000_000_000)
THEIRS = Report("theirs", "m", (w1(80, 12, 4.0), w1(60, 5, 2.0), w4(600, 30)), 4_500_000_000)


def test_cells_of_a_workload_follow_its_passes() -> None:
    assert [cell.label for cell in cells_of(W1)] == ["output", "TTFT p50", "TPOT p50"]
    assert [cell.label for cell in cells_of(W4)] == ["TTFT cold", "TTFT hit"]


def test_a_spread_is_over_the_repetitions_of_its_workload() -> None:
    throughput, *_ = cells_of(W1)

    assert spread(throughput, OURS.repetitions) == (64, 96, 128)
    assert spread(throughput, [w4(1, 1)]) is None


def test_a_lead_is_the_median_of_pairs_and_above_one_means_better() -> None:
    throughput, ttft, tpot = cells_of(W1)

    assert lead(throughput, OURS.repetitions, THEIRS.repetitions) == (128 / 32 + 64 / 64) / 2
    assert lead(ttft, OURS.repetitions, THEIRS.repetitions) == pytest.approx(
        (80 / 40 + 60 / 50) / 2
    )
    assert lead(tpot, OURS.repetitions, THEIRS.repetitions) == pytest.approx((12 / 8 + 5 / 10) / 2)
    assert lead(throughput, [w4(1, 1)], [w4(1, 1)]) is None


def test_the_table_shows_medians_ranges_leads_and_memory() -> None:
    table = figures([OURS, THEIRS], [W1, W4])

    assert table.headers == ("cell", "ours (range)", "theirs (range)", "lead over theirs")
    assert table.rows[0] == ("W1 output tok/s", "96.0 (64.0–128)", "48.0 (32.0–64.0)", "2.50×")
    assert table.rows[-2] == ("W4 TTFT hit ms", "10.0 (10.0–10.0)", "30.0 (30.0–30.0)", "3.00×")
    assert table.rows[-1] == ("peak RSS GB", "1.00", "4.50", "4.50×")
    assert [one.factor for one in leads([OURS, THEIRS], [W4])] == pytest.approx([2, 3])


def test_what_is_not_known_is_a_dash() -> None:
    failed = sum_up(W1, 0, LoopOutcome((Failure("all", "cut"),), 0.0))
    table = figures([OURS, Report("theirs", "m", (failed, failed, w4(1, 1)), None)], [W1])

    assert [row[2:] for row in table.rows] == [("–", "–")] * 4


def test_notes_tell_failures_cache_and_chunks() -> None:
    failed = sum_up(W1, 0, LoopOutcome((Failure("all", "cut"), Failure("all", "cut")), 0.0))
    told = notes([OURS, Report("theirs", "m", (failed,), None)])

    assert told == [
        "ours: all 4 requests answered whole",
        "ours W1: all: 0% cached, 2.00 tokens per chunk",
        "ours W4: cold: 0% cached, 1.00 tokens per chunk; hit: 98% cached, 1.00 tokens per chunk",
        "theirs: 2 of 2 requests FAILED",
        "W1: cut",
        "theirs W1: all: unknown cached, – tokens per chunk",
    ]


def test_json_holds_every_repetition() -> None:
    document = orjson.loads(as_json([OURS, THEIRS], [W1, W4], ["a machine"]))

    assert document["machine"] == ["a machine"]
    assert [one["name"] for one in document["reports"]] == ["ours", "theirs"]
    assert document["reports"][0]["repetitions"][0]["passes"][0]["ttft_ms"]["p99"] == 40
    assert {one["cell"] for one in document["leads"]} >= {"W1 output", "W4 TTFT hit"}


def test_the_gateways_cost_is_a_table_and_a_line() -> None:
    ms = Distribution.of([1.0, 2.0, 3.0])
    assert ms is not None
    lag = LoopLag(((0.01, 90.0), (0.02, 97.0), (0.05, 100.0), (float("inf"), 100.0)))
    cost = GatewayCost(ms, ms, ms, lag)

    assert gateway_table(cost).rows[2] == (
        "added by the gateway ms",
        "2.00",
        "2.80",
        "2.98",
        "3.00",
    )
    assert gateway_note(cost) == (
        "event loop under W2: 3 of 100 timers late by over 20 ms, none by over 50 ms"
    )
    assert orjson.loads(as_json([], [], [], cost))["gateway"]["added_ms"]["p50"] == 2


def test_tables_align_for_a_terminal_and_for_markdown() -> None:
    table = Table(("cell", "ms"), (("W1", "8.25"), ("W2 long", "12")))

    assert table.text() == "cell       ms\n-------  ----\nW1       8.25\nW2 long    12"
    assert table.markdown() == "| cell | ms |\n| --- | ---: |\n| W1 | 8.25 |\n| W2 long | 12 |"
    with pytest.raises(ValueError, match="1 cells under 2 headers"):
        Table(("a", "b"), (("x",),))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.123, "0.12"), (8.251, "8.25"), (12.34, "12.3"), (1234.5, "1,234")],
)
def test_numbers_show_three_digits(value: float | None, shown: str) -> None:
    assert number(value) == shown
