"""The tenants parts: what is offered, what becomes of it, what the figures say."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from gateway.settings import Settings
from loadtest.bench import tenants_goodput, tenants_neighbour, tenants_overhead
from loadtest.bench.campaign import CampaignError
from loadtest.bench.completion import Completion
from loadtest.bench.plan import tenants_parts
from loadtest.bench.report import as_json
from loadtest.bench.routing_proxy import running_stub
from loadtest.bench.tenants import TENANTS_PARTS, TenantsFigures
from loadtest.bench.tenants_goodput import GoodputFigures, GoodputPlan, measure_goodput
from loadtest.bench.tenants_goodput import sum_up as sum_up_goodput
from loadtest.bench.tenants_load import Fate, Offer, Shape, send, send_in_turn, side_by_side
from loadtest.bench.tenants_neighbour import NeighbourFigures, NeighbourPlan, measure_neighbour
from loadtest.bench.tenants_overhead import OverheadPlan, measure_overhead, overhead_config
from loadtest.bench.tenants_report import tenants_notes, tenants_tables
from loadtest.bench.tenants_server import BenchTenant, tenants_config
from loadtest.forebay_server import RunningServer
from loadtest.target import Target
from loadtest.wire.connection import Endpoint
from policies.slo import Slo
from tests.loadtest.fake_server import Behaviour, Call, Reply, answer_well, fake_server

SHORT = Shape(4, 2)
SLO = Slo(ttft_s=0.5, tpot_s=0.1)
GOODPUT = GoodputPlan(
    seconds=0.2, shape=SHORT, slo=SLO, clients=2, capacity_s=0.05, patience_s=2.0, overload=1.5
)
NEIGHBOUR = NeighbourPlan(
    long_requests=5, long=Shape(8, 2), short=SHORT, per_s=50.0, lead_s=0.0, alone_s=0.1, slo=SLO
)


def fate(ttft_s: float | None, *, shed: bool = False, tpot_s: float = 0.01) -> Fate:
    answer = None
    if ttft_s is not None:
        answer = Completion("", ttft_s, tpot_s, 1.0, 4, 2, 0, 2, "")
    return Fate(0.0, 1.0, answer, shed)


async def shed(call: Call, reply: Reply) -> None:
    await reply.whole(503, b'{"error":{"message":"full"}}', retry_after="2")


async def answer_slowly(call: Call, reply: Reply) -> None:
    await asyncio.sleep(0.01)
    await answer_well(call, reply)


async def never(call: Call, reply: Reply) -> None:
    await asyncio.Event().wait()


async def shed_without_a_word(call: Call, reply: Reply) -> None:
    await reply.whole(503, b'{"error":{"message":"full"}}')


async def refuse(call: Call, reply: Reply) -> None:
    await reply.whole(429, b'{"error":{"message":"too many"}}', retry_after="2")


async def sent(behaviour: Behaviour, patience_s: float = 5.0) -> list[Fate]:
    async with fake_server(behaviour) as server:
        target = Target("t", server.endpoint, "m")
        return await send(Offer(target, SHORT, [0.0, 0.01, 0.01], patience_s), "seed")


def test_tenants_stands_for_all_of_its_parts() -> None:
    assert tenants_parts(["tenants"]) == TENANTS_PARTS
    assert tenants_parts(["W1", "tenants-goodput"]) == ("tenants-goodput",)
    assert tenants_parts(["routing"]) == ()


async def test_what_is_answered_shed_and_given_up_is_told_apart() -> None:
    answered = await sent(answer_well)
    assert all(one.kept(Slo(ttft_s=5.0)) and not one.shed for one in answered)
    assert len(answered) == 3
    assert [(one.answer, one.shed) for one in await sent(shed)] == [(None, True)] * 3
    assert [(one.answer, one.shed) for one in await sent(never, 0.05)] == [(None, False)] * 3


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [(shed_without_a_word, "no Retry-After in whole seconds"), (refuse, "status 429: too many")],
)
async def test_any_other_answer_ends_the_bench_in_one_line(behaviour: Behaviour, why: str) -> None:
    with pytest.raises(CampaignError, match=why):
        await sent(behaviour)


async def test_other_errors_are_not_mistaken_for_ours() -> None:
    async def fails(error: Exception) -> None:
        raise error

    with pytest.raises(ExceptionGroup) as raised:
        async with side_by_side() as tasks:
            tasks.create_task(fails(ValueError()))
    assert isinstance(raised.value.exceptions[0], ValueError)


async def test_sending_ends_with_its_event() -> None:
    over = asyncio.Event()

    async def then_over(call: Call, reply: Reply) -> None:
        await answer_well(call, reply)
        over.set()

    async with fake_server(then_over) as server:
        offer = Offer(Target("t", server.endpoint, "m"), SHORT, [0.0, 600.0])
        async with asyncio.timeout(5):
            fates = await send(offer, "seed", over)
    assert len(fates) == 1


async def test_clients_in_turn_have_one_request_each_under_way() -> None:
    async with fake_server(answer_well) as server:
        fates = await send_in_turn(Target("t", server.endpoint, "m"), SHORT, 3, 0.1, "seed")
    assert server.most_in_flight <= 3
    assert server.connections == 3
    assert len(fates) == len(server.calls) >= 3
    assert len({tuple(call.body["prompt"]) for call in server.calls}) == len(fates)


def running(*endpoints: Endpoint) -> Any:
    """In place of a forebay: every tenant's way in leads to the same server."""

    @asynccontextmanager
    async def tenants(
        tenants: Sequence[BenchTenant], seed: int
    ) -> AsyncIterator[Mapping[str, Target]]:
        yield {
            each.id: Target(each.id, replace(endpoints[0], key=each.id), "m") for each in tenants
        }

    return tenants


async def goodput_figures(monkeypatch: pytest.MonkeyPatch) -> tuple[GoodputFigures, list[Call]]:
    async with fake_server(answer_slowly) as server:
        monkeypatch.setattr(tenants_goodput, "running_tenants", running(server.endpoint))
        found = await measure_goodput(rounds=2, seed=1, tell=lambda _: None, plan=GOODPUT)
    return found, server.calls


async def neighbour_figures(
    monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour = answer_well
) -> tuple[NeighbourFigures, list[Call]]:
    async with fake_server(behaviour) as server:
        monkeypatch.setattr(tenants_neighbour, "running_tenants", running(server.endpoint))
        found = await measure_neighbour(rounds=2, seed=1, tell=lambda _: None, plan=NEIGHBOUR)
    return found, server.calls


async def test_goodput_is_measured_at_capacity_and_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = await goodput_figures(monkeypatch)

    assert len(found.capacity_per_s) == len(found.at_capacity) == len(found.fifo) == 2
    for capacity, at, over, fifo in zip(
        found.capacity_per_s, found.at_capacity, found.overload, found.fifo, strict=True
    ):
        assert at.offered_per_s == pytest.approx(capacity, rel=0.1)
        assert over.offered_per_s == pytest.approx(1.5 * capacity, rel=0.1)
        assert over.offered_per_s == fifo.offered_per_s
        assert over.shed == over.given_up == 0
    by_key = [call.headers["authorization"].removeprefix("Bearer ") for call in calls]
    assert set(by_key) == {"tenant1", "tenant2", "tenant3", "everybody"}
    prompts = [tuple(call.body["prompt"]) for call in calls]
    assert len(set(prompts)) == len(prompts)


def test_a_run_counts_what_was_offered_however_it_ended() -> None:
    late, slow = fate(0.6), fate(0.1, tpot_s=0.2)
    own = [fate(0.1), late, slow, fate(None, shed=True), fate(None)]
    run = sum_up_goodput([own, [fate(0.1)] * 2, []], replace(GOODPUT, seconds=2.0))

    assert (run.offered_per_s, run.goodput_per_s) == (3.5, 1.5)
    assert run.attainment == (pytest.approx(1 / 3), 1.0, 0.0)
    assert run.shares == (0.6, 0.4, 0.0)
    assert (run.answered, run.shed, run.given_up) == (5, 1, 1)


def test_against_nothing_a_ratio_has_no_end() -> None:
    good = sum_up_goodput([[fate(0.1)], [], []], GOODPUT)
    none = sum_up_goodput([[fate(None)], [], []], GOODPUT)
    found = GoodputFigures((1.0,), (good,), (good,), (none,), GOODPUT)
    assert (found.over_fifo, found.over_capacity) == (math.inf, 1.0)
    *_, ratios = tenants_tables(TenantsFigures(None, None, found))
    assert "∞" in ratios.text()
    assert replace(found, overload=(none,)).over_fifo is None


def test_everybody_offers_more_than_a_share_of_twice_the_capacity() -> None:
    plan = GoodputPlan()
    for due, offered in zip(plan.shares, plan.offered_shares, strict=True):
        assert plan.overload * offered > 1.3 * due
    assert sum(plan.offered_shares) == pytest.approx(1)


async def test_neighbours_are_measured_alone_together_and_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, calls = await neighbour_figures(monkeypatch)

    assert found.alone.quiet_ttft_ms is not None
    assert found.alone.quiet_ttft_ms.count == 2 * 5
    for figure in (found.alone, found.together, found.fifo):
        assert len(figure.noisy_tokens_per_s) == 2
        assert figure.attainment in (1.0, None)
    keys = {call.headers["authorization"] for call in calls if len(call.body["prompt"]) == 8}
    assert keys == {"Bearer noisy", "Bearer everybody"}


async def test_a_long_request_that_is_shed_is_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CampaignError, match="turned away instead of queued"):
        await neighbour_figures(monkeypatch, shed)


@pytest.fixture
async def figures(monkeypatch: pytest.MonkeyPatch) -> TenantsFigures:
    """All of them, of a stub in place of every server."""

    @asynccontextmanager
    async def other_stub(settings: Mapping[str, str], *, config: str) -> AsyncIterator[Any]:
        assert len(set(settings.values())) == 2
        yield RunningServer(stub, os.getpid(), 0.0, Path())

    @asynccontextmanager
    async def same_stub() -> AsyncIterator[Endpoint]:
        yield stub

    async def parts(module: str, arguments: Sequence[str]) -> dict[str, Any]:
        assert arguments[0] == "--redis"
        return {module: {"p50_us": 12.0, "p99_us": 34.0}}

    monkeypatch.setattr(tenants_overhead, "running_stub", same_stub)
    monkeypatch.setattr(tenants_overhead, "running_forebay", other_stub)
    monkeypatch.setattr(tenants_overhead, "json_of_module", parts)
    plan = OverheadPlan(rounds=1, alone_requests=3, crowd_requests=8, crowd=4, warm_up=4)
    async with running_stub() as stub:
        overhead = await measure_overhead(lambda _: None, plan)
    neighbour, _ = await neighbour_figures(monkeypatch)
    goodput, _ = await goodput_figures(monkeypatch)
    return TenantsFigures(overhead, neighbour, goodput)


async def test_tables_notes_and_json_show_every_part(figures: TenantsFigures) -> None:
    overhead, parts, neighbour, beside, goodput, ratios = (
        table.text() for table in tenants_tables(figures)
    )
    assert "local: JSON" in overhead
    assert "shared, Valkey over its socket: SSE, 16 events" in overhead
    assert parts.splitlines()[-1].split() == ["gateway.bench_tenancy", "12.0", "34.0"]
    assert "first come, first served" in neighbour
    assert "≤ 1.50×" in beside
    assert goodput.count("at capacity") == 2
    assert "due 14.3% / 28.6% / 57.1%" in ratios
    assert len(tenants_notes(figures)) == 2
    document = orjson.loads(as_json([], [], [], tenants=figures))
    assert len(document["tenants"]["overhead"]["requests"]) == 6
    assert document["tenants"]["goodput"]["plan"]["weights"] == [1.0, 2.0, 4.0]
    assert tenants_tables(TenantsFigures(None, None, None)) == []


def test_configurations_load_and_hold_whom_they_should() -> None:
    tenants = [BenchTenant("a", weight=2), BenchTenant("b", "interactive", slo=SLO)]
    settings = Settings.model_validate(yaml.safe_load(tenants_config(tenants)))
    plain, promised = settings.tenants
    assert (plain.weight, plain.slo.as_slo().promises) == (2, False)
    assert promised.service_class == "interactive"
    assert (promised.slo.ttft_ms, promised.slo.tpot_ms) == (500, 100)

    text = overhead_config(Endpoint("127.0.0.1", 1, "/v1"), "unix:///run/valkey.sock")
    settings = Settings.model_validate(yaml.safe_load(text))
    free, held = settings.tenants
    assert not free.limits.as_limits().any
    for limits in (held.limits, held.keys[0].limits, held.limits.models["stub"]):
        assert None not in (limits.rpm, limits.tpm, limits.concurrency, limits.budget_usd)
    assert held.slo.as_slo().promises
    assert [model.price.output > 0 for model in settings.models] == [True, False]
