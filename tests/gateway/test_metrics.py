"""Metrics: what they count, and that no client can add a series."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from cache.block import Tier
from cache.directory import Directory
from engine.report import EngineStats, StepReport
from gateway.dispatch.member import Member
from gateway.loop_lag import watch_loop_lag
from gateway.metrics import Metrics
from gateway.news.fleet_news import LocalNews
from gateway.slo.admission import Admission
from gateway.slo.windowed_book import WindowedSloBook
from gateway.tenants import Tenant, TenantCache
from policies.slo import Slo
from tests.gateway.fakes import ScriptedReplica

SECRET = b"server secret"
STATS = EngineStats(
    waiting=2,
    running=3,
    pages_free=5,
    pages_cached=6,
    pages_held=7,
    pages_total=18,
    preemptions=4,
    steps=9,
    alive=True,
    last_step_age_s=0.5,
)


def values(metrics: Metrics) -> dict[str, float]:
    """Every series and its value."""
    lines = metrics.render().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def make() -> Metrics:
    return Metrics(models=["m"], tenants=["acme"], secret=SECRET)


def test_a_finished_request_is_counted_everywhere() -> None:
    metrics = make()
    for _ in range(2):
        metrics.request_finished(
            tenant="acme",
            model="m",
            endpoint="chat",
            outcome="success",
            ttft_s=0.02,
            tpot_s=0.008,
            e2e_s=0.5,
            prompt_tokens=100,
            cached_by_tier={Tier.DEVICE: 48, Tier.DRAM: 0, Tier.REDIS: 16},
            generated_tokens=10,
        )
    seen = values(metrics)
    both = 'model="m",tenant="acme"'
    request = 'forebay_requests_total{endpoint="chat",model="m",outcome="success",tenant="acme"}'
    assert seen[request] == 2
    assert seen[f"forebay_ttft_seconds_count{{{both}}}"] == 2
    assert seen[f"forebay_tpot_seconds_sum{{{both}}}"] == 0.016
    assert seen[f"forebay_e2e_seconds_sum{{{both}}}"] == 1.0
    assert seen[f"forebay_prompt_tokens_total{{{both}}}"] == 200
    assert seen[f"forebay_cached_tokens_total{{{both}}}"] == 128
    by_tier = {
        tier: seen[f'forebay_cached_tokens_by_tier_total{{{both},tier="{tier}"}}'] for tier in Tier
    }
    assert by_tier == {"device": 96, "dram": 0, "redis": 32}
    assert seen[f"forebay_generated_tokens_total{{{both}}}"] == 20
    assert not [series for series in seen if "_created" in series]


def test_times_that_never_came_are_not_observed() -> None:
    metrics = make()
    metrics.request_finished(tenant="acme", model="m", endpoint="chat", outcome="cancelled")
    assert values(metrics)['forebay_ttft_seconds_count{model="m",tenant="acme"}'] == 0


def test_no_client_string_becomes_a_label() -> None:
    metrics = make()
    metrics.request_finished(tenant=None, model=None, endpoint="chat", outcome="refused")
    metrics.request_finished(tenant="x", model="x", endpoint="/x", outcome="x")
    with metrics.in_flight("x"):
        metrics.unknown_field()
    before = set(values(metrics))
    for index in range(200):
        name = f"junk-{index}"
        metrics.request_finished(tenant=name, model=name, endpoint=name, outcome=name)
        with metrics.in_flight(name):
            metrics.unknown_field()
    assert set(values(metrics)) == before
    assert "junk" not in metrics.render().decode()
    assert values(metrics)["forebay_unknown_fields_total"] == 201


def test_in_flight_returns_to_zero_also_after_an_error() -> None:
    metrics = make()
    name = 'forebay_in_flight{tenant="acme"}'
    assert values(metrics)[name] == 0
    try:
        with metrics.in_flight("acme"), metrics.in_flight("acme"):
            assert values(metrics)[name] == 2
            raise ConnectionResetError
    except ConnectionResetError:
        pass
    assert values(metrics)[name] == 0


def test_a_replica_is_read_when_scraped() -> None:
    metrics = make()
    asked = 0

    def stats() -> EngineStats:
        nonlocal asked
        asked += 1
        return STATS

    metrics.watch_replica("m-0", "m", stats)
    assert asked == 0
    seen = values(metrics)
    assert asked == 1
    at = 'model="m",replica="m-0"'
    assert seen[f"forebay_waiting{{{at}}}"] == 2
    assert seen[f"forebay_running{{{at}}}"] == 3
    assert seen['forebay_pages{model="m",replica="m-0",state="cached"}'] == 6
    assert seen[f"forebay_preemptions_total{{{at}}}"] == 4
    assert seen[f"forebay_steps_total{{{at}}}"] == 9
    assert seen[f"forebay_replica_alive{{{at}}}"] == 1


def test_steps_are_observed_and_bare_aborts_are_not() -> None:
    metrics = make()
    step = StepReport(outputs=(), seconds=0.009, tokens=16, sequences=4, stats=STATS)
    bare = StepReport(outputs=(), seconds=0.0, tokens=0, sequences=0, stats=STATS)
    for report in (step, bare, step):
        metrics.observe_step("m-0", report)
    seen = values(metrics)
    assert seen['forebay_step_seconds_count{replica="m-0"}'] == 2
    assert seen['forebay_step_tokens_sum{replica="m-0"}'] == 32
    assert seen['forebay_step_sequences_sum{replica="m-0"}'] == 8


def test_reloads_and_version_are_there_from_the_start() -> None:
    metrics = make()
    metrics.config_loaded("success", reload=False)
    seen = values(metrics)
    assert seen['forebay_config_reloads_total{result="success"}'] == 0
    assert seen['forebay_config_reloads_total{result="failure"}'] == 0
    assert abs(seen["forebay_config_last_success_timestamp"] - time.time()) < 10
    assert any(name.startswith("forebay_build_info") for name in seen)


async def test_a_stall_of_the_event_loop_is_seen() -> None:
    metrics = make()
    with watch_loop_lag(metrics.observe_loop_lag):
        await asyncio.sleep(0.03)
        time.sleep(0.1)  # noqa: ASYNC251 - the stall under test
        await asyncio.sleep(0.03)
    seen = values(metrics)
    assert seen["forebay_event_loop_lag_max_seconds"] >= 0.09
    assert seen['forebay_event_loop_lag_seconds_bucket{le="+Inf"}'] >= 3
    await asyncio.sleep(0.02)
    assert values(metrics) == seen  # nothing goes on outside the scope


def test_servers_that_do_not_keep_tenants_apart_are_counted() -> None:
    metrics = make()
    metrics.fleet.watch(Directory().stats, LocalNews(), dict, lambda: {"far/gpu-1:9001": 2})
    series = 'forebay_remote_isolation_failures_total{replica="far/gpu-1:9001"}'
    assert values(metrics)[series] == 2


def test_tenants_that_come_and_go_leave_no_series() -> None:
    metrics, book = make(), WindowedSloBook()
    metrics.slo.watch(book, Admission())
    before = set(values(metrics))
    for number in range(3):
        guest = Tenant(id=f"guest{number}", cache=TenantCache(), slo=Slo(ttft_s=0.1))
        metrics.set_tenants(["acme", guest.id])
        with metrics.in_flight(guest.id):
            book.note(guest, "m", promised=True, ttft_s=9.0, tpot_s=0.1, publish_s=9.0)
            metrics.request_finished(
                tenant=guest.id, model="m", endpoint="chat", outcome="success", ttft_s=9.0
            )
            assert values(metrics)[f'forebay_slo_burn_rate{{tenant="{guest.id}",window="1h"}}'] > 1
            metrics.set_tenants(["acme"])
            assert set(values(metrics)) == before
    # what ends later is somebody's whose name is known no longer
    metrics.request_finished(tenant="guest0", model="m", endpoint="chat", outcome="success")
    assert {name for name in values(metrics) if "guest" in name} == set()
    # and one of the same name is another one
    metrics.set_tenants(["acme", "guest0"])
    metrics.request_finished(tenant="guest0", model="m", endpoint="chat", outcome="success")
    labels = 'endpoint="chat",model="m",outcome="success",tenant="guest0"'
    assert values(metrics)[f"forebay_requests_total{{{labels}}}"] == 1


def test_replicas_that_come_and_go_leave_no_series() -> None:
    metrics = make()
    kept = Member(
        ScriptedReplica(name="kept"),
        "in-process",
        max_running=8,
        capacity=None,
        block_tokens=16,
        clock=time.monotonic,
    )
    metrics.dispatch.watch("m", lambda: [kept])
    step = StepReport(outputs=(), seconds=0.009, tokens=16, sequences=4, stats=STATS)

    def work(replica: str) -> None:
        candidate = SimpleNamespace(name=replica)
        metrics.dispatch.decided(
            SimpleNamespace(
                model="m", policy="random", candidate=candidate, decision_s=0.001, moved_from=None
            )
        )
        metrics.observe_step(replica, step)

    work("kept")
    values(metrics)
    before = set(values(metrics))
    for number in range(3):
        work(f"guest{number}")
        metrics.forget_replica(f"guest{number}")
        values(metrics)
    assert set(values(metrics)) == before
    work("kept")
    labels = 'model="m",policy="random",replica="kept"'
    assert values(metrics)[f"forebay_route_decisions_total{{{labels}}}"] == 2
