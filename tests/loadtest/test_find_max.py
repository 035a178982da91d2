"""The search for the largest rate, against servers whose truth is known."""

from __future__ import annotations

import math
from itertools import cycle
from random import Random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.find_max import FoundMax, find_max
from loadtest.plan import TenantPlan
from loadtest.rate_point import Verdict
from loadtest.record import Run
from loadtest.stopping import StoppedError
from tests.loadtest.knee import PROMISED, STALLED, Knee, sharp, soft

PRECISION = 0.05


async def found(knee: Knee, **options: Any) -> FoundMax:
    """What the search finds from one request per second."""
    known: dict[str, Any] = {"start_rate": 1.0, "precision": PRECISION, "tell": unheard}
    return await find_max(knee.measure, **known | options)


def unheard(line: str) -> None:
    """Progress that nobody reads."""


async def test_a_sharp_knee_is_bracketed_within_the_precision() -> None:
    for seed in range(10):
        result = await found(Knee(sharp(6.5), seed))

        assert result.rate is not None
        assert result.fails is not None
        assert 6.5 / (1 + PRECISION) <= result.rate <= 6.5 < result.fails.rate
        assert result.fails.rate <= result.rate * (1 + PRECISION)
        assert not result.cut_short


async def test_a_soft_knee_is_found_and_what_is_claimed_is_true() -> None:
    rates, failing = [], []
    for seed in range(50):
        knee = Random(seed).uniform(5, 8)
        # Of 100 requests 98 are kept at 0.95 of the knee, 95 at the knee, 87 at 1.05 of it.
        server = Knee(soft(knee * (1 + 0.05 * math.log(19)), knee * 0.05), seed, requests=400)
        result = await found(server, start_rate=4.0)
        assert result.fails is not None
        rates.append((result.rate or 0.0) / knee)
        failing.append(result.fails.rate / knee)

    # As near as the precision, and a little for what so few requests cannot tell apart.
    assert sum(1 / (1 + PRECISION) - 0.03 <= rate <= 1 for rate in rates) >= 45
    assert sum(1 <= rate <= 1 + PRECISION + 0.03 for rate in failing) >= 45
    # A rate beyond the knee is called good, or one before it bad, in 5 % at most: with that, five
    # of 50 or fewer have a probability of 96 %.
    assert sum(rate > 1 for rate in rates) <= 5
    assert sum(rate < 1 for rate in failing) <= 5


async def test_the_first_rate_may_be_far_above_the_knee() -> None:
    result = await found(Knee(sharp(6.5)), start_rate=100.0)

    assert result.rate == pytest.approx(6.5, rel=PRECISION)
    assert [rate for rate, _ in verdicts(result)][-1] == 100.0


def verdicts(result: FoundMax) -> list[tuple[float, Verdict]]:
    """All rates with their verdicts."""
    return [(point.rate, point.verdict) for point in result.points]


async def test_a_server_that_never_holds_has_no_rate_and_ends_the_search() -> None:
    knee = Knee(lambda rate: 0.2)
    result = await found(knee)

    assert result.rate is None
    assert result.goodput_rps is None
    assert [rate for rate, _ in knee.measured] == [2.0**-halving for halving in range(7)]
    assert result.lines()[0].startswith(
        "no rate was shown to hold TTFT ≤ 500 ms and TPOT ≤ 120 ms for 95 %; "
        "at 0.0156 requests/s they do not hold ("
    )


async def test_a_server_that_never_fails_is_asked_up_to_the_highest_rate() -> None:
    result = await found(Knee(lambda rate: 1.0), highest_rate=50.0)

    assert result.rate == 50.0
    assert result.fails is None
    assert not result.cut_short
    assert result.lines()[0].startswith("at least 50.0 requests/s hold ")
    assert result.lines()[0].endswith("; no rate was shown to fail")


async def test_what_the_client_is_not_up_to_is_not_blamed_on_the_server() -> None:
    knee = Knee(lambda rate: 0.995 if rate <= 11 else 0.1, client_limit=11.0)
    result = await found(knee)

    assert result.rate == pytest.approx(11.0, rel=PRECISION)
    assert result.fails is not None
    assert result.fails.verdict is Verdict.CLIENT
    assert result.lines()[0].startswith("at least ")
    assert f"the client is the limit ({STALLED})" in result.lines()[0]
    # It is asked again before it is believed.
    assert [rate for rate, _ in knee.measured].count(16.0) == 2


async def test_noise_without_reason_ends_the_search_without_a_contradiction() -> None:
    whims = cycle([1.0, 0.0, 1.0, 1.0, 0.0])
    knee = Knee(lambda rate: next(whims))
    result = await found(knee, most_runs=60)
    names = [verdict for _, verdict in verdicts(result)]

    assert len(knee.measured) == result.runs < 60
    assert not result.cut_short
    assert Verdict.FAILS in names
    assert Verdict.HOLDS not in names[names.index(Verdict.FAILS) :]


async def test_a_rate_at_the_target_itself_is_left_open() -> None:
    knee = Knee(lambda rate: {1.0: 1.0, 2.0: 0.95}.get(rate, 1.0 if rate < 2 else 0.5), seed=3)
    result = await found(knee, precision=2.0, repetitions=3)
    open_points = [point for point in result.points if point.verdict is Verdict.UNDECIDED]

    assert [(point.rate, point.runs) for point in open_points] == [(2.0, 3)]
    assert [repetition for rate, repetition in knee.measured if rate == 2.0] == [0, 1, 2]
    assert any(line.startswith("at 2.00 the runs leave it open (") for line in result.lines())
    assert result.rate == 1.0
    assert result.fails is not None
    assert result.fails.rate == 4.0


async def test_what_one_lucky_run_found_is_run_again_before_it_is_claimed() -> None:
    lucky = iter([1.0])
    knee = Knee(lambda rate: 0.995 if rate < 4 else 0.5 if rate > 4 else next(lucky, 0.9))
    result = await found(knee, precision=1.5)

    assert (4.0, Verdict.UNDECIDED) in verdicts(result)
    assert result.rate == 2.0
    # The rate that is claimed in the end has been run as often as may be.
    assert [repetition for rate, repetition in knee.measured if rate == 2.0] == [0, 1, 2]
    assert not result.cut_short


async def test_too_few_requests_are_said_to_be_too_few() -> None:
    knee = Knee(lambda rate: 1.0, requests=20)
    result = await found(knee, highest_rate=4.0, repetitions=2)

    assert result.rate is None
    # It does not go down, where it could not see more.
    assert [rate for rate, _ in verdicts(result)] == [1.0, 2.0, 4.0]
    assert "it takes 96 requests to show 95 %" in result.lines()[0]


async def test_a_search_that_runs_out_says_so() -> None:
    result = await found(Knee(sharp(6.5)), most_runs=3)

    assert result.cut_short
    assert result.runs == 3
    assert "the search ended after 3 runs, before it was done" in result.lines()


async def test_every_run_is_told_and_every_rate_is_a_row() -> None:
    told: list[str] = []
    knee = Knee(sharp(6.5))
    result = await found(knee, tell=told.append)

    assert len(told) == result.runs == len(knee.measured)
    assert told[0].startswith("1.00 requests/s: holds (")
    assert result.table().headers[:2] == ("requests/s", "verdict")
    assert [row[1] for row in result.table().rows] == [
        point.verdict.value for point in result.points
    ]
    assert result.goodput_rps == pytest.approx(result.rate, rel=0.02)
    document = orjson.loads(orjson.dumps(result, option=orjson.OPT_NON_STR_KEYS))
    assert len(document["points"]) == len(result.points)


async def test_rates_are_said_in_what_they_are_counted_in() -> None:
    told: list[str] = []
    result = await found(Knee(sharp(6.5)), unit="sessions/s", tell=told.append)

    assert told[0].startswith("1.00 sessions/s: holds (")
    assert " sessions/s hold TTFT" in result.lines()[0]
    assert result.table().headers[0] == "sessions/s"


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.integers(1, 12))
async def test_whatever_is_measured_the_search_ends(shares: list[float], most_runs: int) -> None:
    turns = cycle(shares)
    knee = Knee(lambda rate: next(turns), requests=60)
    result = await found(knee, most_runs=most_runs)

    assert len(knee.measured) == result.runs <= most_runs
    names = [verdict for _, verdict in verdicts(result)]
    if Verdict.FAILS in names:
        assert Verdict.HOLDS not in names[names.index(Verdict.FAILS) :]


async def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ValueError, match="no tenant has a TTFT or TPOT"):
        await found(Knee(sharp(6.5), tenants=(TenantPlan("acme"),)))
    with pytest.raises(ValueError, match="cannot start at a rate of 0"):
        await found(Knee(sharp(6.5)), start_rate=0.0)
    with pytest.raises(ValueError, match="precision"):
        await found(Knee(sharp(6.5)), precision=0.0)
    assert PROMISED[0].slo.promises


async def test_a_search_that_is_stopped_has_what_was_found_until_then() -> None:
    knee = Knee(sharp(6.5))
    runs = 0

    async def measure(rate: float, repetition: int) -> Run:
        nonlocal runs
        runs += 1
        if runs > 3:
            raise StoppedError
        return await knee.measure(rate, repetition)

    result = await find_max(measure, start_rate=1.0, tell=unheard)

    assert result.cut_short
    assert result.runs == 3
    assert [point.rate for point in result.points] == [1.0, 2.0, 4.0]
    assert result.rate == 4.0


async def test_a_search_that_is_stopped_at_once_has_nothing() -> None:
    async def measure(rate: float, repetition: int) -> Run:
        raise StoppedError

    result = await find_max(measure, start_rate=1.0, tell=unheard)

    assert (result.points, result.rate, result.cut_short) == ((), None, True)
    assert result.lines()[0] == "nothing was measured"
