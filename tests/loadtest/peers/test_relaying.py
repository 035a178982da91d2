"""Routers before the stub: turns, what is added to the direct way, and the table."""

from __future__ import annotations

import os

import pytest

from loadtest.bench.campaign import Contender
from loadtest.bench.routing_proxy import MODEL, ProxyCase, ProxyPlan, Round
from loadtest.peers import relaying
from loadtest.peers.relaying import DIRECT, RelayFigure, measure_relaying, relay_table
from loadtest.stats.distribution import Distribution
from loadtest.target import Target
from loadtest.wire.connection import Endpoint

PLAN = ProxyPlan(rounds=2, alone_requests=3, crowd_requests=8, crowd=4, warm_up=5)
NOWHERE = Endpoint("127.0.0.1", 1, "/v1")


async def test_contenders_take_turns_and_are_held_against_the_direct_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: list[tuple[str, str, int, int]] = []

    async def answered(target: Target, case: ProxyCase, concurrency: int, count: int) -> Round:
        rounds.append((target.name, case.name, concurrency, count))
        taken_ms = 2.0 if target.name == DIRECT else 2.5 + len(rounds) / 100
        return Round((taken_ms,) * count, 1e3 / taken_ms)

    monkeypatch.setattr(relaying, "run_round", answered)
    contenders = [
        Contender(Target(DIRECT, NOWHERE, MODEL)),
        Contender(Target("router", NOWHERE, MODEL), os.getpid()),
    ]
    said: list[str] = []
    figures = await measure_relaying(contenders, PLAN, said.append)

    assert said == [
        *("JSON, 1 at once", "JSON, 4 at once"),
        *("SSE, 16 events, 1 at once", "SSE, 16 events, 4 at once"),
    ]
    assert [one[0] for one in rounds] == [
        *(DIRECT, DIRECT, "router", "router"),
        *(DIRECT, "router", "router", DIRECT) * 4,
    ]
    assert {one[2:] for one in rounds} == {(4, 5), (1, 3), (4, 8)}
    assert [one.through for one in figures] == [DIRECT, "router"] * 4
    assert [one.taken_ms.count for one in figures] == [6, 6, 16, 16] * 2
    assert all((one.added_p50_ms == 0) is (one.through == DIRECT) for one in figures)
    assert figures[1].added_p50_ms == pytest.approx((0.56 + 0.57) / 2)
    assert figures[0].per_s == 500
    assert all(one.cpu_s is None for one in figures if one.through == DIRECT)


def test_the_table_has_a_row_per_server_and_columns_per_case() -> None:
    def figure(through: str, concurrency: int, added_ms: float, cpu_s: float | None) -> RelayFigure:
        taken = Distribution.of([0.5, 1.5])
        assert taken is not None
        return RelayFigure(through, "JSON", concurrency, taken, added_ms, 1234.0, cpu_s)

    table = relay_table(
        [
            *(figure(DIRECT, 1, 0.0, None), figure("fast", 1, 0.0571, 0.02)),
            *(figure(DIRECT, 32, 0.0, None), figure("fast", 32, 1.0, 0.0423)),
        ]
    )
    assert table.headers == (
        *("through", "JSON: added p50 µs @1", "requests/s @32", "p99 ms @32"),
        "core-s/1,000 @32",
    )
    assert table.rows == (
        (DIRECT, "–", "1,234", "1.49", "–"),
        ("fast", "57.1", "1,234", "1.49", "0.042"),
    )
