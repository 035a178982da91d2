"""The gate in front of a model: who goes in, who waits for how long, who is told to come again."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack, suppress
from time import monotonic
from typing import Any

import pytest

from gateway.demand import Ask
from gateway.dispatch.load import Load
from gateway.dispatch.prefix import UNKNOWN
from gateway.dispatch.router import Router
from gateway.errors import ApiError
from gateway.metrics import Metrics
from gateway.slo.admission import Admission, Downgrade
from gateway.slo.line import Line
from gateway.tenants import Tenant
from gateway.terms import Terms
from policies.admission import SURE, Verdict
from policies.routing import RouteRequest, Standing
from policies.service_class import ServiceClass
from policies.slo import OnOverload, Slo
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import Observer, eventually, router_over, tenant

TTFT_S = 0.5
LATE_TOKENS = 2500  # more than half a second's work
MUCH = 8000


class Stage:
    """A model's router over one replica, which tests load as they like."""

    def __init__(self, capacity: int | None = None, **bounds: int) -> None:
        observer = Observer(Metrics(["m"], [], b"secret"))
        self.router: Router[Any] = router_over("m", [ScriptedReplica(name="m/0")], observer)
        if capacity is not None:
            [member] = self.router.members
            member.load = Load(1, capacity)
            member.load.listen(self.router.changed)
        self.admission = Admission(**bounds)

    @property
    def load(self) -> Load:
        return self.router.members[0].load

    async def admit(
        self,
        who: Tenant,
        *,
        flow: bytes = b"acme",
        weight: float = 1.0,
        timeout_s: float | None = None,
        came_s: float = 0.0,
        tokens: int = 50,
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
        max_queue_s: float = 60.0,
        promised: bool = True,
        **more: Any,
    ) -> None:
        """Let in a request that came `came_s` ago."""
        started_s = monotonic() - came_s
        terms = Terms(
            service_class=service_class,
            flow=flow,
            weight=weight,
            ttft_s=who.slo.ttft_s if promised else None,
            timeout_at_s=None if timeout_s is None else started_s + timeout_s,
            started_s=started_s,
        )
        route = RouteRequest(tokens, 16, terms.priority, flow, weight, terms.due_s)
        ask = Ask(route, UNKNOWN)
        await self.admission.admit(who, self.router, ask, terms, max_queue_s=max_queue_s, **more)

    def waiting(self) -> int:
        return self.admission.waiting.get("m", 0)


def promised_to(on_overload: OnOverload = "reject", **slo: Any) -> Tenant:
    slo = {"ttft_s": TTFT_S, "max_queue_s": 5.0, **slo}
    return tenant("acme", slo=Slo(on_overload=on_overload, **slo))


async def refused(coroutine: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        await coroutine
    assert error.value.status == 503
    assert int(error.value.headers["retry-after"]) >= 1
    return error.value


async def settle() -> None:
    """Let whatever can go on now do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_is_in_time_goes_in_without_waiting() -> None:
    stage = Stage()
    admission = stage.admit(promised_to("queue"))
    with pytest.raises(StopIteration):
        admission.send(None)
    assert stage.admission.rulings == {("m", Verdict.ADMIT, ""): 1}


async def test_who_would_be_late_is_told_when_to_come_again() -> None:
    stage = Stage()
    with stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"acme"):
        error = await refused(stage.admit(promised_to()))
        receipt = stage.router.decide(RouteRequest(50, 16, 0, b"acme"), UNKNOWN)
    assert error.code == "slo_unattainable"
    # when what is in front is done but for what there is time for anyway
    late_s = receipt.predicted_ttft_s - SURE * TTFT_S
    assert int(error.headers["retry-after"]) == math.ceil(late_s)
    assert stage.admission.rulings == {("m", Verdict.SHED, "slo"): 1}


async def test_what_was_not_promised_is_bounded_by_work() -> None:
    stage = Stage()
    with stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"acme"):
        await stage.admit(promised_to(), promised=False)
        await stage.admit(tenant("acme"))
        error = await refused(stage.admit(tenant("acme"), max_queue_s=0.3))
    assert error.code == "capacity_exceeded"


async def test_another_tenants_queue_is_no_reason_to_refuse() -> None:
    stage = Stage()
    with ExitStack() as queued:
        for _ in range(50):
            queued.enter_context(stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"beta"))
        await stage.admit(promised_to())
        await refused(stage.admit(promised_to(), flow=b"beta"))


async def test_who_leaves_before_the_first_token_is_refused_at_once() -> None:
    stage = Stage()
    with stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"acme"):
        error = await refused(stage.admit(promised_to("queue"), timeout_s=0.4))
        assert error.code == "slo_unattainable"
        assert "x-request-timeout-ms" in error.message
        await stage.admit(tenant("acme"), timeout_s=30.0)


async def test_another_model_takes_it_where_that_is_wanted() -> None:
    stage, who = Stage(), promised_to("downgrade", downgrade_to="small")
    with stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"acme"):
        with pytest.raises(Downgrade) as downgrade:
            await stage.admit(who)
        assert downgrade.value.model == "small"
        assert (await refused(stage.admit(who, may_downgrade=False))).code == "slo_unattainable"
    stage = Stage(capacity=1)
    with stage.load.share(1, 1):
        with pytest.raises(Downgrade):
            await stage.admit(who)
        error = await refused(stage.admit(who, promised=False))
        assert error.code == "capacity_exceeded"


async def test_who_may_wait_goes_on_as_soon_as_there_is_room() -> None:
    stage = Stage()
    with stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"acme") as ahead:
        waiting = asyncio.ensure_future(stage.admit(promised_to("queue")))
        await eventually(lambda: stage.waiting() == 1)
        assert not waiting.done()
        ahead.begin()
        await asyncio.wait_for(waiting, 1)
    assert stage.waiting() == 0
    assert stage.admission.rulings == {("m", Verdict.QUEUE, "slo"): 1}


async def test_in_time_overtakes_who_is_late_already() -> None:
    stage = Stage()
    with stage.load.share(1200, 1200, 0, b"acme"):
        receipt = stage.router.decide(RouteRequest(50, 16, 0, b"acme"), UNKNOWN)
        assert 0.5 * TTFT_S < receipt.predicted_ttft_s < SURE * TTFT_S
        late = asyncio.ensure_future(stage.admit(promised_to("queue"), came_s=3.0))
        await eventually(lambda: stage.waiting() == 1)
        await stage.admit(promised_to("queue"))
        assert not late.done()
    await asyncio.wait_for(late, 1)


async def test_waiting_ends_where_the_tenant_or_the_client_wants_it_to() -> None:
    stage = Stage()
    with stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"acme"):
        began_s = monotonic()
        error = await refused(stage.admit(promised_to("queue", max_queue_s=0.05)))
        assert 0.05 <= monotonic() - began_s < 1.0
        assert error.code == "slo_unattainable"
        with stage.load.share(MUCH, MUCH, 0, b"acme"):
            who = promised_to("queue", max_queue_s=0.0)
            await refused(stage.admit(who))
    assert stage.waiting() == 0
    assert stage.admission.rulings["m", Verdict.SHED, "slo"] == 2


async def test_who_leaves_is_forgotten_at_once() -> None:
    stage = Stage()
    with stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"acme"):
        waiting = asyncio.ensure_future(stage.admit(promised_to("queue")))
        await eventually(lambda: stage.waiting() == 1)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        assert stage.waiting() == 0
        assert not stage.router._watchers


async def test_one_goes_on_at_a_time_class_by_class_and_by_weight() -> None:
    """What each adds to the load decides on the next."""
    stage, order = Stage(), []
    busy = Standing(pending_tokens=MUCH, waiting=1)  # somebody else's, which nobody overtakes

    async def one(name: str, flow: bytes, weight: float, service_class: ServiceClass) -> None:
        who = promised_to("queue", max_queue_s=30.0)
        await stage.admit(who, flow=flow, weight=weight, service_class=service_class)
        order.append(name)
        # it is sent at once, and keeps the replica busy until everybody has had a look
        stage.load.set_foreign(busy)
        for _ in range(20):
            await asyncio.sleep(0)
        stage.load.set_foreign(Standing())

    stage.load.set_foreign(busy)
    calls = [
        ("batch", b"batch", 1.0, ServiceClass.STANDARD),
        *((f"light {number}", b"light", 1.0, ServiceClass.INTERACTIVE) for number in range(3)),
        *((f"heavy {number}", b"heavy", 2.0, ServiceClass.INTERACTIVE) for number in range(6)),
    ]
    tasks = [asyncio.ensure_future(one(*call)) for call in calls]
    await eventually(lambda: stage.waiting() == len(calls))
    assert order == []
    stage.load.set_foreign(Standing())
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert order[-1] == "batch"
    for end in (3, 6, 9):
        heavy = sum(name.startswith("heavy") for name in order[:end])
        assert abs(heavy - 2 * end / 3) <= 1
    assert [name for name in order if name.startswith("heavy")] == [
        f"heavy {number}" for number in range(6)
    ]


async def test_who_could_go_on_is_found_behind_many_who_cannot() -> None:
    stage, who = Stage(), promised_to("queue", max_queue_s=30.0)
    flows = [f"flow {number}".encode() for number in range(24)]
    with ExitStack() as queued:
        ahead = {
            flow: queued.enter_context(stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, flow))
            for flow in flows
        }
        tasks = [asyncio.ensure_future(stage.admit(who, flow=flow)) for flow in flows]
        await eventually(lambda: stage.waiting() == len(flows))
        ahead[flows[-1]].end()
        await asyncio.wait_for(tasks[-1], 5)
        assert stage.waiting() == len(flows) - 1
    await asyncio.wait_for(asyncio.gather(*tasks), 5)


async def test_within_a_flow_what_is_due_first_goes_first() -> None:
    stage, order = Stage(), []

    async def one(name: str, came_s: float) -> None:
        await stage.admit(promised_to("queue", max_queue_s=30.0), came_s=came_s)
        order.append(name)

    with stage.load.share(MUCH, MUCH, 0, b"acme"):
        tasks = [
            asyncio.ensure_future(one(name, came_s))
            for name, came_s in (("new", 0.0), ("old", 2.0), ("older", 3.0))
        ]
        await eventually(lambda: stage.waiting() == 3)
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert order == ["older", "old", "new"]


async def test_a_place_is_waited_for_where_all_are_taken() -> None:
    stage = Stage(capacity=1)
    with stage.load.share(1, 1) as last:
        assert (await refused(stage.admit(promised_to()))).code == "capacity_exceeded"
        waiting = asyncio.ensure_future(stage.admit(promised_to("queue")))
        await eventually(lambda: stage.waiting() == 1)
        last.end()
        await asyncio.wait_for(waiting, 1)


async def test_where_nothing_serves_who_sends_it_knows_what_to_do() -> None:
    stage = Stage()
    stage.router.members[0].draining = True
    await stage.admit(promised_to())
    with stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"acme"):
        stage.router.members[0].draining = False
        waiting = asyncio.ensure_future(stage.admit(promised_to("queue")))
        await eventually(lambda: stage.waiting() == 1)
        stage.router.members[0].draining = True
        stage.router.changed()
        await asyncio.wait_for(waiting, 1)


async def test_who_is_less_urgent_makes_room_where_too_many_wait() -> None:
    stage, who = Stage(most_waiting=2), promised_to("queue")
    with stage.load.share(MUCH, MUCH, 0, b"acme"):
        urgent = asyncio.ensure_future(stage.admit(who))
        patient = asyncio.ensure_future(
            stage.admit(who, service_class=ServiceClass.STANDARD, timeout_s=60.0)
        )
        await eventually(lambda: stage.waiting() == 2)
        await refused(stage.admit(who, service_class=ServiceClass.STANDARD))
        another = asyncio.ensure_future(stage.admit(who))
        assert (await refused(patient)).code == "capacity_exceeded"
        assert stage.waiting() == 2
        await refused(stage.admit(who))
        assert not urgent.done()
        assert not another.done()
    await asyncio.wait_for(asyncio.gather(urgent, another), 1)


async def test_one_tenant_does_not_keep_the_others_of_its_class_from_waiting() -> None:
    stage, who = Stage(most_waiting=4), promised_to("queue")
    stage.load.set_foreign(Standing(pending_tokens=MUCH, waiting=1))
    crowd = [asyncio.ensure_future(stage.admit(who)) for _ in range(4)]
    await eventually(lambda: stage.waiting() == 4)
    others = []
    for number in range(2):
        others.append(asyncio.ensure_future(stage.admit(who, flow=b"beta")))
        # of the crowd, the one goes that came last
        assert (await refused(crowd[3 - number])).code == "capacity_exceeded"
    for flow in (b"acme", b"beta"):  # alike by now
        await refused(stage.admit(who, flow=flow))
    assert not any(each.done() for each in [*crowd[:2], *others])
    stage.load.set_foreign(Standing())
    await asyncio.wait_for(asyncio.gather(*crowd[:2], *others), 5)


async def test_prompts_that_wait_are_bounded_together() -> None:
    stage, who = Stage(most_waiting_tokens=1000), promised_to("queue")
    with stage.load.share(MUCH, MUCH, 0, b"acme"):
        tasks = [asyncio.ensure_future(stage.admit(who, tokens=400)) for _ in range(2)]
        await eventually(lambda: stage.waiting() == 2)
        await refused(stage.admit(who, tokens=400))
        await refused(stage.admit(who, tokens=1001))
        tasks.append(asyncio.ensure_future(stage.admit(who, tokens=200)))
        await eventually(lambda: stage.waiting() == 3)
    await asyncio.wait_for(asyncio.gather(*tasks), 1)
    assert stage.waiting() == 0


async def test_predictions_that_were_too_low_are_put_right() -> None:
    stage, who = Stage(), promised_to()
    with stage.load.share(1200, 1200, 0, b"acme"):
        await stage.admit(who)
        for _ in range(40):
            receipt = stage.router.decide(RouteRequest(50, 16, 0, b"acme"), UNKNOWN)
            stage.router.note_answer(receipt, receipt.decided_s + 4 * receipt.predicted_ttft_s)
        await refused(stage.admit(who))
    # where nobody is in front, there is nothing to be late for
    await stage.admit(who)


async def test_a_line_that_nobody_tells_anything_looks_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.slo.line._LONGEST_PAUSE_S", 0.02)
    stage = Stage()
    with stage.load.share(LATE_TOKENS, LATE_TOKENS, 0, b"acme"):
        waiting = asyncio.ensure_future(stage.admit(promised_to("queue")))
        await eventually(lambda: stage.waiting() == 1)
        monkeypatch.setattr(stage.router, "bias", lambda *_: 0.01)
        await asyncio.wait_for(waiting, 1)


async def test_many_changes_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = Line._look
    monkeypatch.setattr(Line, "_look", lambda line: (looks.append(1), look(line)))
    stage = Stage()
    with stage.load.share(MUCH, MUCH, 0, b"acme"):
        waiting = asyncio.ensure_future(stage.admit(promised_to("queue")))
        await eventually(lambda: stage.waiting() == 1)
        for _ in range(500):
            with stage.load.share(1, 1) as share:
                share.begin()
        await settle()
        assert len(looks) <= 2
    await asyncio.wait_for(waiting, 1)
