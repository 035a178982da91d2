"""The gateway's own time, and its event loop's lateness read off a metrics page."""

from __future__ import annotations

import math

import orjson
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from loadtest.bench.campaign import CampaignError
from loadtest.bench.gateway_cost import LAG_HISTOGRAM, GatewayCost, LoopLag, measure_gateway
from loadtest.target import Target
from tests.loadtest.fake_server import Call, Reply, answer_well, fake_server


def page(*lags_s: float) -> str:
    """What prometheus-client itself writes for these lags."""
    registry = CollectorRegistry()
    histogram = Histogram(
        LAG_HISTOGRAM, "Lag.", buckets=(0.001, 0.01, 0.02, 0.05), registry=registry
    )
    for lag_s in lags_s:
        histogram.observe(lag_s)
    return generate_latest(registry).decode()


def test_lags_are_counted_by_bound() -> None:
    lag = LoopLag.parse(page(0.0005, 0.0005, 0.015, 0.03))

    assert lag.timers == 4
    assert lag.later_than(0.02) == 1
    assert lag.later_than(0.005) == 2
    assert lag.later_than(0.0001) == 4
    assert lag.worst_at_most_s == 0.05


def test_only_what_came_after_counts() -> None:
    before, after = LoopLag.parse(page(3.0, 0.03)), LoopLag.parse(page(3.0, 0.03, 0.0005))
    lag = after.since(before)

    assert (lag.timers, lag.later_than(0.02), lag.worst_at_most_s) == (1, 0, 0.001)
    assert LoopLag.parse(page(3.0)).worst_at_most_s == math.inf


def test_a_page_without_the_histogram_is_a_line_that_names_it() -> None:
    with pytest.raises(CampaignError, match=LAG_HISTOGRAM):
        LoopLag.parse("up 1\n")


async def measure(headers: dict[str, str], metrics_status: int = 200) -> GatewayCost:
    async def gateway(call: Call, reply: Reply) -> None:
        if call.path == "/metrics":
            await reply.whole(metrics_status, page(*[0.0005] * (len(server.calls))).encode())
        elif call.body["stream"]:
            await answer_well(call, reply)
        else:
            await reply.whole(200, orjson.dumps({"choices": []}), **headers)

    async with fake_server(gateway) as server:
        return await measure_gateway(Target("gw", server.endpoint, "m"), 0)


async def test_added_time_is_the_calls_less_the_engines() -> None:
    cost = await measure({"X_Forebay_Engine_Ms": "-1000"})

    assert cost.engine_ms.p50 == -1000
    assert cost.added_ms.p50 == pytest.approx(cost.call_ms.p50 + 1000)
    assert cost.call_ms.count == 200
    assert cost.lag.timers == 33
    assert cost.lag.worst_at_most_s == 0.001


async def test_a_server_that_does_not_tell_is_a_line_that_says_what() -> None:
    with pytest.raises(CampaignError, match="no number in x-forebay-engine-ms"):
        await measure({})
    with pytest.raises(CampaignError, match="/metrics: status 403"):
        await measure({"x_forebay_engine_ms": "1"}, metrics_status=403)
