"""A hot prefix is loaded onto a second replica, by a request that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from cache.block import Owner, Tier
from cache.block_events import BlockEvents, TierChange
from engine.request import EngineRequest, SharedPrefix
from engine.sampling_params import SamplingParams
from gateway.dispatch import warmer as warmer_module
from gateway.dispatch.prefix import UNKNOWN
from gateway.dispatch.run import MoveTerms, Run
from gateway.dispatch.warmer import WARM_UP_PRIORITY, Warmer
from gateway.metrics import Metrics
from gateway.plan import prompt_prefix
from gateway.replica_group import ReplicaGroup
from policies.cost import Coefficients
from policies.routing import Queued
from tests.gateway.fakes import COST, ScriptedReplica, block_links
from tests.gateway.stage import Observer, router_over

ROOT = b"r" * 16
OWNER = Owner(b"t" * 8, b"s" * 8)
PREFIX = [*range(256)] * 2


class Replica(ScriptedReplica):
    """Loads so slowly that a request rather goes where its prefix is, as long as nothing waits."""

    def coefficients(self) -> Coefficients:
        return COST._replace(dram_block_s=250e-6)


@dataclass
class Stage:
    """`m/0` has the prefix on its device, the others in `tier`; chance is always the same. Time
    passes for the warmer alone, as `rising` and `steady` say."""

    others: Sequence[ScriptedReplica]
    tier: Tier = Tier.DRAM
    shared: SharedPrefix | None = None
    root: bytes | None = ROOT
    now_s: float = 1000.0
    outcomes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.metrics = Metrics(["m"], [], b"secret")
        self.first = Replica(name="m/0")
        self.router = router_over("m", [self.first, *self.others], Observer(self.metrics))
        self.over = asyncio.Event()
        self.warmer = self.router.warmer = Warmer(
            "m",
            self.router.find,
            self.router.directory,
            self._warmed_up,
            Random(0),
            clock=lambda: self.now_s,
        )
        self.sent = 0
        self.lives_on(self.first, Tier.DEVICE)
        for replica in self.others:
            self.lives_on(replica, self.tier)

    def _warmed_up(self, model: str, outcome: Any) -> None:
        self.metrics.dispatch.warmed_up(model, outcome)
        self.outcomes.append(outcome)
        self.over.set()

    def lives_on(
        self, replica: ScriptedReplica, tier: Tier, prefix: Sequence[int] = PREFIX, seq: int = 1
    ) -> None:
        """The replica has the prefix there, and says so."""
        links = block_links(self.request(prefix))
        replica.owners |= dict.fromkeys(links, OWNER)
        change = TierChange(tier, tuple(links))
        self.router.directory.apply(replica.name, BlockEvents(1, seq, (change,)))

    def request(self, token_ids: Sequence[int]) -> EngineRequest:
        params = SamplingParams(max_tokens=4)
        return EngineRequest(
            f"r{self.sent}", list(token_ids), params, self.root, owner=OWNER, shared=self.shared
        )

    async def send(self, prefix: Sequence[int] = PREFIX) -> str:
        """One request that goes on differently from all others, answered to the end."""
        self.sent += 1
        request = self.request(
            [*prefix, *(self.sent >> shift & 255 for shift in (8, 0))] + [7] * 18
        )
        known = UNKNOWN
        if self.root is not None:
            known = prompt_prefix(self.root, request.prompt_token_ids, self.shared)
        async with asyncio.timeout(5), Run(self.router, request, known, MoveTerms()) as run:
            async for _ in run:
                pass
        return run.replica

    async def steady(self, per_s: float, seconds: float, **what: Any) -> list[str]:
        """Requests at this rate; where they went. Ends early when a warm-up has begun."""
        went = []
        for _ in range(round(per_s * seconds)):
            self.now_s += 1 / per_s
            went.append(await self.send(**what))
            if self.begun:
                break
        return went

    async def rising(self) -> float:
        """Two more requests a second with every second until a warm-up has begun; how many a second
        there were then."""
        per_s = 4.0
        while not self.begun:
            per_s += 2.0
            assert per_s < 100, "nothing was warmed up"
            assert set(await self.steady(per_s, 1.0)) == {"m/0"}
        return per_s

    @property
    def begun(self) -> bool:
        """Whether a warm-up is under way, or is over and nobody has asked."""
        return bool(self.warmer._under_way) or self.over.is_set()

    async def hears(self) -> str:
        """How the warm-up ended."""
        await asyncio.wait_for(self.over.wait(), 5)
        self.over.clear()
        return self.outcomes[-1]

    def left_behind(self) -> list[object]:
        """Whatever there is of requests and warm-ups."""
        left: list[object] = [*self.warmer._under_way]
        for member in self.router.members:
            left += [member.name] * (member.load.sequences + member.replica.open)
            left += [*member.load.standing().queued]
        return left


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.REDIS])
async def test_a_rising_prefix_is_loaded_onto_another_replica_before_any_request_goes_there(
    tier: Tier,
) -> None:
    second = Replica(name="m/1")
    stage = Stage([second], tier)
    with capture_logs() as logs:
        per_s = await stage.rising()
        assert stage.warmer._warming.utilisation("m/0", stage.now_s) < 0.7
        assert await stage.hears() == "loaded"
    [warm_up] = second.requests
    assert warm_up.prompt_token_ids == [*PREFIX, stage.sent >> 8]
    assert (warm_up.params.max_tokens, warm_up.priority) == (1, WARM_UP_PRIORITY)
    assert (warm_up.chain_root, warm_up.owner) == (ROOT, OWNER)
    assert second.generated == 1
    assert stage.left_behind() == []
    metrics = stage.metrics.render().decode()
    assert 'forebay_prefix_warmups_total{model="m",outcome="loaded"} 1.0' in metrics
    [line] = [line for line in logs if line["event"] == "prefix warm-up"]
    assert line.pop("seconds") == 0
    assert line == {
        "event": "prefix warm-up",
        "log_level": "info",
        "model": "m",
        "replica": "m/1",
        "source": tier.value,
        "tokens": 512,
        "outcome": "loaded",
    }
    # from now on they share the work
    stage.lives_on(second, Tier.DEVICE, seq=2)
    went = await stage.steady(per_s, 2.0)
    assert min(went.count("m/0"), went.count("m/1")) > len(went) // 5


async def test_what_a_shared_prefix_is_chained_from_stays_what_it_was() -> None:
    second = Replica(name="m/1")
    stage = Stage([second], shared=SharedPrefix(b"c" * 16, 256))
    await stage.rising()
    assert await stage.hears() == "loaded"
    [warm_up] = second.requests
    assert block_links(warm_up) == block_links(stage.request(PREFIX))


async def test_nothing_is_loaded_where_nothing_waits() -> None:
    second = Replica(name="m/1")
    stage = Stage([second])
    assert set(await stage.steady(2.0, 60.0)) == {"m/0"}
    assert second.requests == []


async def test_prompts_that_share_kv_with_nobody_warm_up_nothing() -> None:
    second = Replica(name="m/1")
    stage = Stage([second])
    stage.root = None
    assert set(await stage.steady(50.0, 5.0)) == {"m/0", "m/1"}
    assert stage.outcomes == []
    assert WARM_UP_PRIORITY not in {request.priority for request in second.requests}
    assert stage.warmer._warming.utilisation("m/0", stage.now_s) > 1.0  # for all that they are work


@pytest.mark.parametrize(
    "trouble",
    [{"full": True}, {"dies_after": 0}, {"fails_after": 0}],
    ids=["full", "dies", "gives up"],
)
async def test_a_target_that_fails_leaves_nothing_behind(trouble: dict[str, Any]) -> None:
    stage = Stage([Replica(name="m/1", **trouble)])
    await stage.rising()
    assert await stage.hears() == "failed"
    assert stage.left_behind() == []
    member = stage.router.find("m/1")
    assert member is not None
    assert member.breaker.closed
    # it is left alone for as long as the copy would have been for
    assert set(await stage.steady(20.0, 5.0)) == {"m/0"}
    assert stage.outcomes == ["failed"]


async def test_where_one_target_fails_another_is_found_at_once() -> None:
    stage = Stage([Replica(name=f"m/{number}", dies_after=0) for number in (1, 2)])
    per_s = await stage.rising()
    assert await stage.hears() == "failed"
    for replica in stage.others:
        replica.dies_after = None
    await stage.steady(per_s, 1.0)
    assert await stage.hears() == "loaded"
    assert [len(replica.requests) for replica in stage.others] == [1, 1]


async def test_a_target_that_breaks_in_an_unforeseen_way_is_logged() -> None:
    class Broken(Replica):
        def submit(self, request: EngineRequest) -> Any:
            raise RuntimeError("out of order")

    stage = Stage([Broken(name="m/1")])
    with capture_logs() as logs:
        await stage.rising()
        assert await stage.hears() == "failed"
    assert [line["event"] for line in logs] == ["prefix warm-up broke down", "prefix warm-up"]
    assert stage.left_behind() == []


async def test_what_the_target_did_not_have_is_expected_there_no_more() -> None:
    second = Replica(name="m/1")
    stage = Stage([second], Tier.REDIS)
    second.owners.clear()
    await stage.rising()
    assert await stage.hears() == "computed"
    links = block_links(stage.request(PREFIX))
    assert set(stage.router.directory.lookup({16: links}, 0.0)) == {"m/0"}


async def test_a_warm_up_counts_in_the_target_and_whatever_comes_overtakes_it() -> None:
    second = Replica(name="m/1", gate=asyncio.Event())
    stage = Stage([second])
    await stage.rising()
    async with asyncio.timeout(5):
        while not second.requests:  # noqa: ASYNC110 - there is nothing to be told by
            await asyncio.sleep(0)
    member = stage.router.find("m/1")
    assert member is not None
    assert member.load.standing()[:2] == (1, 1)
    [queued] = member.load.standing().queued
    assert queued._replace(tokens_per_s=0.0) == Queued(WARM_UP_PRIORITY, 1, 1)
    second.gate.set()
    assert await stage.hears() == "loaded"
    assert stage.left_behind() == []
    assert member.load.standing().answer_tokens == 4  # its one token is no answer


async def test_a_target_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmer_module, "_TIMEOUT_S", 0.01)
    second = Replica(name="m/1", gate=asyncio.Event())
    stage = Stage([second])
    await stage.rising()
    assert await stage.hears() == "late"
    assert stage.left_behind() == []
    assert len(second.aborted) == 1


async def test_a_target_that_is_drained_need_not_wait_for_it() -> None:
    second = Replica(name="m/1", gate=asyncio.Event())
    stage = Stage([second])
    await stage.rising()
    group = ReplicaGroup(stage.router)
    await asyncio.wait_for(group.retire("m/1", 5), 2)
    assert await stage.hears() == "cancelled"
    assert stage.left_behind() == []


async def test_closing_ends_what_is_under_way_and_begins_nothing_more() -> None:
    second = Replica(name="m/1", gate=asyncio.Event())
    stage = Stage([second])
    per_s = await stage.rising()
    await asyncio.wait_for(stage.warmer.close(), 2)
    assert stage.outcomes == ["cancelled"]
    assert stage.left_behind() == []
    stage.now_s += 10
    stage.over.clear()
    await stage.steady(per_s, 12.0)
    await stage.warmer.close()
    assert stage.outcomes == ["cancelled"]


async def test_only_so_many_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmer_module, "_AT_ONCE", 1)
    gate = asyncio.Event()
    stage = Stage([Replica(name=f"m/{number}", gate=gate) for number in (1, 2)])
    other = [255 - token for token in PREFIX]
    stage.lives_on(stage.first, Tier.DEVICE, other, seq=2)
    for replica in stage.others:
        stage.lives_on(replica, Tier.DRAM, other, seq=2)
    per_s = await stage.rising()
    for _ in range(100):
        stage.now_s += 1 / per_s
        await stage.send(other)
    assert len(stage.warmer._under_way) == 1
    gate.set()
    assert await stage.hears() == "loaded"
    await stage.steady(per_s, 5.0, prefix=other)
    assert await stage.hears() == "loaded"
    loaded = [request.prompt_token_ids[0] for one in stage.others for request in one.requests]
    assert sorted(loaded) == [PREFIX[0], other[0]]
    assert stage.left_behind() == []


async def test_a_target_on_trial_is_left_alone() -> None:
    second = Replica(name="m/1")
    stage = Stage([second])
    member = stage.router.find("m/1")
    assert member is not None
    for _ in range(3):
        member.failed()
    assert not member.breaker.closed
    member.breaker._retry_at_s = 0.0  # a probe is due
    assert member.takes_requests()
    await stage.steady(20.0, 10.0)
    assert (stage.outcomes, second.requests) == ([], [])
