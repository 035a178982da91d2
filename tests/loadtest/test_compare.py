"""Contenders in turn: who runs when, what is the same for all, and what becomes of failures."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from typing import Any

import orjson
import pytest

from loadtest.bench.campaign import CampaignError
from loadtest.compare import Contender, compare, how_long, orders
from loadtest.comparison import Comparison
from loadtest.difference import Judgement
from loadtest.metrics import ERRORS, METRICS
from loadtest.plan import Load, Session, Turn
from loadtest.record import ClientHealth, Outcome, Run
from loadtest.stopping import StoppedError
from tests.loadtest.some_records import answer, failure, run_of


def contender(name: str, *ttft_ms: float, **fields: Any) -> Contender:
    """Answers of these times, whatever the seed."""

    async def measure(seed: int) -> Run:
        return run_of([answer(one, 10.0) for one in ttft_ms], name=name, **fields)

    return Contender(name, measure)


async def found(*contenders: Contender, **options: Any) -> Comparison:
    """Three rounds without a rest, of which nobody hears."""
    known: dict[str, Any] = {"rounds": 3, "seed": 7, "rest_s": 0.0, "tell": unheard}
    return await compare(contenders, **known | options)


def unheard(line: str) -> None:
    """Progress that nobody reads."""


def test_two_take_turns_in_going_first() -> None:
    assert list(islice(orders(2), 5)) == [(0, 1), (1, 0), (0, 1), (1, 0), (0, 1)]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_orders_are_balanced(count: int) -> None:
    cycle_of = count if count % 2 == 0 else 2 * count
    rounds = list(islice(orders(count), cycle_of))
    places = Counter((place, one) for order in rounds for place, one in enumerate(order))
    neighbours = Counter(pair for order in rounds for pair in pairwise(order))

    assert all(sorted(order) == list(range(count)) for order in rounds)
    assert set(places.values()) == {cycle_of // count}
    assert len(neighbours) == count * (count - 1)
    assert len(set(neighbours.values())) == 1
    assert all(back == there[::-1] for there, back in zip(rounds[::2], rounds[1::2], strict=True))
    assert list(islice(orders(count), cycle_of, 2 * cycle_of)) == rounds


async def test_all_get_the_same_seed_in_a_round_and_never_that_of_another() -> None:
    seen: list[tuple[str, int]] = []

    def noting(name: str) -> Contender:
        async def measure(seed: int) -> Run:
            seen.append((name, seed))
            return run_of([answer(100.0)])

        return Contender(name, measure)

    told: list[str] = []
    result = await found(noting("A"), noting("B"), tell=told.append)

    assert seen == [("A", 7000), ("B", 7000), ("B", 7001), ("A", 7001), ("A", 7002), ("B", 7002)]
    assert [(one.contender, one.seed) for one in result.attempts] == seen
    assert [(one.round, one.place) for one in result.attempts] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
        (3, 1),
        (3, 2),
    ]
    assert told[:3] == ["A: round 1 of 3", "B: round 1 of 3", "B: round 2 of 3"]


async def test_figures_are_those_of_the_runs() -> None:
    result = await found(contender("A", 100.0, 200.0), contender("B", 50.0, 100.0))
    [main, *_] = result.differences

    assert (main.metric, main.median, main.median_against) == ("TTFT p95", 97.5, 195.0)
    assert str(main) == "B's TTFT p95 is 2.00× lower (2.00–2.00) than A's: better"
    # What is not known of either is no row.
    assert {one.metric for one in result.differences} == set(METRICS) - {
        "cached share",
        "charged price",
        "machine cost",
    }


async def test_a_contender_that_cannot_be_run_counts_as_failed_and_is_tried_again() -> None:
    rounds = iter(range(4))

    async def measure(seed: int) -> Run:
        if next(rounds) == 1:
            raise CampaignError("B: the server has gone")
        return run_of([answer(100.0)])

    result = await found(contender("A", 100.0), Contender("B", measure), rounds=4)
    failed = [one for one in result.attempts if one.failure is not None]
    by_metric = {one.metric: one for one in result.differences}

    assert [(one.contender, one.round, one.values[ERRORS]) for one in failed] == [("B", 2, 100.0)]
    ttft, errors = by_metric["TTFT p50"].estimate, by_metric[ERRORS].estimate
    assert ttft is not None
    assert errors is not None
    assert (ttft.pairs, errors.pairs, errors.value) == (3, 4, 25.0)
    assert "B could not be run in round 2: B: the server has gone" in result.lines()


async def test_failed_requests_and_a_slow_client_are_told() -> None:
    async def measure(seed: int) -> Run:
        records = [answer(10.0), failure(Outcome.OVERLOADED), failure(Outcome.OVERLOADED)]
        health = ClientHealth(0, 0, 0, 0, 0, 1, ("sent up to 31 ms late",))
        return run_of(records, client=health)

    result = await found(contender("A", 100.0), Contender("B", measure))
    lines = result.lines()

    assert (
        "66.7 % of B's requests failed and 0.00 % of A's: their times are of those answered"
    ) in lines
    assert "B, round 3: sent up to 31 ms late" in lines
    assert "B's error share is 66.7 points higher (66.7–66.7) than A's: worse" in lines


async def test_one_that_answers_nothing_has_no_times_and_still_loses() -> None:
    async def measure(seed: int) -> Run:
        return run_of([failure(Outcome.UNREACHABLE)])

    result = await found(contender("A", 100.0), Contender("B", measure))
    by_metric = {one.metric: one for one in result.differences}

    assert str(by_metric["TTFT p95"]) == "B's TTFT p95: not known in any round beside A's"
    assert by_metric["goodput"].scale == "difference"
    assert by_metric["goodput"].judgement is Judgement.WORSE
    assert str(by_metric["goodput"]).startswith("B's goodput is 1.00 requests/s lower (")


async def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    alone, other = contender("A", 1.0), contender("B", 1.0)
    with pytest.raises(ValueError, match="two contenders or more"):
        await found(alone)
    with pytest.raises(ValueError, match="a name of its own"):
        await found(alone, alone)
    with pytest.raises(ValueError, match="rounds are 1 to"):
        await found(alone, other, rounds=0)
    with pytest.raises(ValueError, match="speed: no such metric; there are TTFT p50, "):
        await found(alone, other, headline="speed")


async def test_a_comparison_goes_into_a_file_and_a_table() -> None:
    result = await found(contender("A", 100.0), contender("B", 100.0), contender("C", 110.0))
    document = orjson.loads(orjson.dumps(result))

    assert document["contenders"] == ["A", "B", "C"]
    assert len(document["attempts"]) == 9
    table = result.table()
    assert table.headers == ("metric", "A", "B", "C", "B to A", "C to A")
    assert table.rows[0] == (
        "TTFT p95 ms",
        "100",
        "100",
        "110",
        "1.00× (1.00–1.00) same",
        "1.10× (1.10–1.10) worse",
    )


async def test_a_comparison_that_is_stopped_has_the_attempts_until_then() -> None:
    runs = 0

    async def three_times(seed: int) -> Run:
        nonlocal runs
        runs += 1
        if runs > 3:
            raise StoppedError
        return run_of([answer(100.0)], name="B")

    result = await found(contender("A", 100.0), Contender("B", three_times), rounds=5)

    assert [one.contender for one in result.attempts] == ["A", "B", "B", "A", "A", "B", "A"][:6]
    assert result.rounds == 3


def test_how_long_it_takes_at_least_is_said_where_it_can_be_known() -> None:
    turns = (Turn(1, tokens=(1,)),)
    timed = Load("timed", [Session(turns), Session(turns, start_s=59.8)])
    closed = Load("closed", [Session(turns)], concurrency=1)

    assert how_long(timed, rounds=5, servers=2) == (
        "5 rounds × 2 servers = 10 runs of 2 requests in 60 s: 10 min at least"
    )
    assert how_long(closed, rounds=1, servers=3) == (
        "1 round × 3 servers = 3 runs of 1 requests, which take as long as the servers need"
    )
