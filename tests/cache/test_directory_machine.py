"""Random fleets against a plain model: what they tell is lost, doubled, reordered and late; they
restart, leave and join; they have blocks of different sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.block import Tier
from cache.block_events import BlockEvents, TierChange
from cache.directory import Directory
from policies.routing import NOTHING_CACHED
from tests.cache.directory_model import Believed, chain_of, of_size

LONG = chain_of(1, 0, 180)
PROMPTS = [
    LONG,
    LONG[:110] + chain_of(2, 110, 70),
    LONG[:30] + chain_of(3, 30, 25),  # short enough to be looked at block by block
    chain_of(4, 0, 130),
]
FLEET = {"a": (16, "redis"), "b": (16, "redis"), "c": (32, None), "d": (64, "redis")}
TTL_S = 8.0

names = st.sampled_from(sorted(FLEET))
prompts = st.sampled_from(range(len(PROMPTS)))
shares = st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0])
at_once = st.sampled_from([True, True, True, False])


@dataclass
class Teller:
    """A replica's own caches, what it has told of them, and what of that is still on the way."""

    block_tokens: int
    epoch: int = 1
    seq: int = 0
    tiers: dict[Tier, set[bytes]] = field(default_factory=lambda: {tier: set() for tier in Tier})
    told: dict[Tier, set[bytes]] = field(default_factory=lambda: {tier: set() for tier in Tier})
    under_way: list[BlockEvents] = field(default_factory=list)
    arrived: list[BlockEvents] = field(default_factory=list)

    def links(self, prompt: int) -> list[bytes]:
        return of_size(PROMPTS[prompt], self.block_tokens)

    def tell(self) -> None:
        self.seq += 1
        changes = []
        for tier, held in self.tiers.items():
            before = self.told[tier]
            changes.append(TierChange(tier, tuple(held - before), tuple(before - held)))
            self.told[tier] = set(held)
        self.under_way.append(BlockEvents(self.epoch, self.seq, tuple(changes)))

    def tell_all(self) -> None:
        self.tell()
        changes = tuple(TierChange(tier, tuple(held)) for tier, held in self.tiers.items())
        self.under_way.append(BlockEvents(self.epoch, self.seq, changes, snapshot=True))

    def restart(self) -> None:
        self.epoch, self.seq = self.epoch + 1, 0
        for tier in Tier:
            self.tiers[tier].clear()
            self.told[tier].clear()


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.now_s = 100.0
        self.tellers = {name: Teller(size) for name, (size, _) in FLEET.items()}
        self.redis: dict[tuple[str, int], set[bytes]] = {}
        self.believed: dict[str, Believed] = {}
        for name in FLEET:
            self.join(name)

    def join(self, name: str) -> None:
        size, shared = FLEET[name]
        self.directory.join(name, block_tokens=size, shares_redis=shared, ttl_s=TTL_S)
        redis = self.redis.setdefault((shared, size), set()) if shared else set()
        self.believed[name] = Believed(size, redis)

    @rule(name=names)
    def join_or_leave(self, name: str) -> None:
        if name in self.believed:
            self.directory.leave(name)
            del self.believed[name]
            assert not any(
                self.directory.lookup(self.sizes(p), self.now_s).get(name) for p in (0, 3)
            )
        else:
            self.join(name)

    @rule(name=names, prompt=prompts, share=shares, at_once=at_once)
    def compute(self, name: str, prompt: int, share: float, at_once: bool) -> None:
        teller = self.tellers[name]
        links = teller.links(prompt)
        teller.tiers[Tier.DEVICE].update(links[: round(share * len(links))])
        self.tell(name, at_once)

    @rule(
        name=names, prompt=prompts, ends=st.lists(shares, min_size=3, max_size=3), at_once=at_once
    )
    def hold_in_tiers(self, name: str, prompt: int, ends: list[float], at_once: bool) -> None:
        """One prompt's beginning on the device, what follows in DRAM, the rest in Redis, and some
        of each in the tier below as well."""
        teller = self.tellers[name]
        links = teller.links(prompt)
        start = 0
        for tier, share in zip(Tier, sorted(ends), strict=True):
            end = round(share * len(links))
            teller.tiers[tier] = set(links[start // 2 : end])
            start = end
        self.tell(name, at_once)

    def tell(self, name: str, at_once: bool) -> None:
        self.tellers[name].tell()
        if at_once:
            self.arrive_in_order(name)

    @rule(
        name=names,
        prompt=prompts,
        share=shares,
        tier=st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DRAM, Tier.REDIS]),
        down=st.sampled_from([True, True, False]),
        at_once=at_once,
    )
    def evict(
        self, name: str, prompt: int, share: float, tier: Tier, down: bool, at_once: bool
    ) -> None:
        """A prompt's end, and whatever extends what goes; perhaps into the tier below."""
        teller = self.tellers[name]
        links = teller.links(prompt)[round(share * len(teller.links(prompt))) :]
        if not links:
            return
        going = set(links)
        for other in range(len(PROMPTS)):
            path = teller.links(other)
            if links[0] in path:
                going.update(path[path.index(links[0]) :])
        going &= teller.tiers[tier]
        teller.tiers[tier] -= going
        if down and tier is not Tier.REDIS:
            teller.tiers[list(Tier)[list(Tier).index(tier) + 1]] |= going
        self.tell(name, at_once)

    @rule(name=names, prompt=prompts, share=shares, at_once=at_once)
    def write(self, name: str, prompt: int, share: float, at_once: bool) -> None:
        teller = self.tellers[name]
        links = teller.links(prompt)
        held = teller.tiers[Tier.DEVICE] | teller.tiers[Tier.DRAM]
        written = [link for link in links[: round(share * len(links))] if link in held]
        teller.tiers[Tier.REDIS].update(written)
        self.tell(name, at_once)

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.tellers[name].restart()

    @rule(name=names)
    def tell_all(self, name: str) -> None:
        self.tellers[name].tell_all()
        self.arrive_in_order(name)

    def arrive_in_order(self, name: str) -> None:
        while self.tellers[name].under_way:
            self.arrive(name, 0)

    @rule(name=names, at=st.integers(0, 2))
    def arrive_out_of_order(self, name: str, at: int) -> None:
        if at < len(self.tellers[name].under_way):
            self.arrive(name, at)

    def arrive(self, name: str, at: int) -> None:
        teller = self.tellers[name]
        events = teller.under_way.pop(at)
        teller.arrived.append(events)
        self.take_in(name, events)

    @precondition(lambda self: any(teller.under_way for teller in self.tellers.values()))
    @rule(name=names)
    def lose(self, name: str) -> None:
        del self.tellers[name].under_way[:1]

    @rule(name=names, back=st.integers(1, 5))
    def arrive_again(self, name: str, back: int) -> None:
        arrived = self.tellers[name].arrived
        if back <= len(arrived):
            self.take_in(name, arrived[-back])

    def take_in(self, name: str, events: BlockEvents) -> None:
        if name not in self.believed:
            assert self.directory.apply(name, events)
            return
        believed = self.believed[name]
        assert self.directory.apply(name, events) == believed.apply(events)
        assert self.directory.needs_snapshot(name) == (believed.seq is None)

    @rule(name=names, prompt=prompts)
    def route(self, name: str, prompt: int) -> None:
        links = self.tellers[name].links(prompt)
        if name not in self.believed:
            assert self.directory.note_routed(name, links, self.now_s) == len(links)
        elif self.believed[name].is_closed(links):
            news = self.directory.note_routed(name, links, self.now_s)
            assert news == self.believed[name].route(links)

    @rule()
    def wait(self) -> None:
        self.now_s += TTL_S
        for believed in self.believed.values():
            believed.routed.clear()

    @rule(budget=st.integers(1, 400))
    def sweep(self, budget: int) -> None:
        self.directory.sweep(budget)

    def sizes(self, prompt: int) -> dict[int, list[bytes]]:
        return {size: of_size(PROMPTS[prompt], size) for size in (16, 32, 64)}

    @rule(prompt=prompts)
    def ask(self, prompt: int) -> None:
        links = self.sizes(prompt)
        found = self.directory.lookup(links, self.now_s)
        for name, believed in self.believed.items():
            own = links[believed.block_tokens]
            if len(own) <= 64 or believed.is_closed(own):
                assert found.get(name, NOTHING_CACHED) == believed.cached(own)
        assert all(cached.tokens > 0 for cached in found.values())

    @invariant()
    def counts_are_right(self) -> None:
        self.directory.check_integrity()
        replicas = self.directory.stats().replicas
        assert replicas.keys() == self.believed.keys()
        for name, believed in self.believed.items():
            assert replicas[name].device == len(believed.device)
            assert replicas[name].dram == len(believed.dram)

    def teardown(self) -> None:
        for name in self.tellers:
            self.tell_all(name)
        for prompt in range(len(PROMPTS)):
            self.ask(prompt)
        for name in list(self.believed):
            self.directory.leave(name)
        while self.directory.sweep():
            pass
        kept_in_redis = {link for links in self.redis.values() for link in links}
        assert self.directory.blocks == len(kept_in_redis)


DirectoryMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None
)
TestDirectoryMachine = DirectoryMachine.TestCase
