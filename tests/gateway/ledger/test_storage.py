"""Named prefixes are charged for the time that they are kept: once, whoever looks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import Owner
from gateway.ledger.row import LedgerRow
from gateway.ledger.row_text import storable
from gateway.ledger.storage import Kept, StorageMeter
from gateway.named_cache import NamedCache, Place
from policies.pricing import FREE, Price

HOUR_S = 3600.0
NOON_S = 1_800_000_000.0 - 1_800_000_000 % HOUR_S
PRICES = {"m": Price(storage=Decimal(1)), "free": FREE}
ACME = Owner(b"acme----", bytes(8))


def prefix(
    name: str = "handbook", *, made_s: float = NOON_S, ttl_s: float = HOUR_S, model: str = "m"
) -> Kept:
    cache = NamedCache(
        place=Place(ACME, name),
        model=model,
        messages=({"role": "system", "content": "text"},),
        tokens=1000,
        kv_bytes=1,
        cached_tokens=0,
        created_s=made_s,
        expires_s=made_s + ttl_s,
    )
    return Kept("acme", cache)


@dataclass
class World:
    """What is kept, the time, and a ledger that takes each id once."""

    now_s: float = NOON_S
    kept: dict[str, Kept] = field(default_factory=dict)
    rows: dict[str, LedgerRow] = field(default_factory=dict)
    answers: bool = True

    def note(self, row: LedgerRow) -> None:
        assert storable(row) is row, "it is stored as it is, its id whole"
        self.rows.setdefault(row.id, row)

    async def list_kept(self) -> list[Kept] | None:
        if not self.answers:
            return None
        return [kept for kept in self.kept.values() if kept.cache.expires_s > self.now_s]

    def meter(self) -> StorageMeter:
        return StorageMeter(self.list_kept, self, PRICES.__getitem__, clock=lambda: self.now_s)

    def keep(self, kept: Kept) -> None:
        self.kept[kept.cache.place.name] = kept

    def charged_s(self) -> float:
        """Of prefixes of 1000 tokens."""
        assert all(row.cost_nusd > 0 and row.kind == "storage" for row in self.rows.values())
        return sum(row.token_hours for row in self.rows.values()) * 3600 / 1000


async def test_an_hour_is_charged_once_it_is_over() -> None:
    world = World()
    meter = world.meter()
    world.keep(prefix(made_s=NOON_S + 600, ttl_s=3 * HOUR_S))
    world.now_s = NOON_S + 1200
    await meter.look()
    assert not world.rows
    world.now_s = NOON_S + HOUR_S + 1
    await meter.look()
    [row] = world.rows.values()
    assert (row.tenant, row.model, row.kind) == ("acme", "m", "storage")
    assert (row.started_s, row.finished_s) == (NOON_S + 600, NOON_S + HOUR_S)
    assert row.token_hours == 1000 * 3000 / 3600
    assert row.cost_nusd == -(-1000 * 3000 * 1000 // 3600)
    await meter.look()
    assert len(world.rows) == 1


async def test_the_rest_is_charged_when_it_expires() -> None:
    world = World()
    meter = world.meter()
    world.keep(prefix(made_s=NOON_S, ttl_s=HOUR_S + 900))
    await meter.look()
    world.now_s = NOON_S + 2.5 * HOUR_S
    await meter.look()
    assert world.charged_s() == HOUR_S + 900
    await meter.look()
    assert len(world.rows) == 2


async def test_one_that_is_deleted_is_charged_until_it_was_last_seen() -> None:
    world = World()
    meter = world.meter()
    world.keep(prefix(ttl_s=10 * HOUR_S))
    world.now_s = NOON_S + 500
    await meter.look()
    world.kept.clear()
    world.now_s = NOON_S + 560
    await meter.look()
    assert world.charged_s() == 500


async def test_one_that_is_made_again_under_its_name_is_another() -> None:
    world = World()
    meter = world.meter()
    world.keep(prefix())
    world.now_s = NOON_S + 100
    await meter.look()
    world.keep(prefix(made_s=NOON_S + 110))
    world.now_s = NOON_S + 160
    await meter.look()
    world.now_s = NOON_S + 3 * HOUR_S
    await meter.look()
    assert world.charged_s() == 100 + HOUR_S


async def test_living_longer_than_was_thought_is_charged() -> None:
    world = World()
    meter = world.meter()
    kept = prefix(ttl_s=300)
    world.keep(kept)
    world.now_s = NOON_S + 200
    await meter.look()
    longer = replace(kept.cache, expires_s=NOON_S + 1000)
    world.keep(Kept("acme", longer))
    world.now_s = NOON_S + 400
    await meter.look()
    world.now_s = NOON_S + 2000
    await meter.look()
    assert world.charged_s() == 1000


async def test_what_cannot_be_asked_is_not_taken_to_be_gone() -> None:
    world = World()
    meter = world.meter()
    world.keep(prefix(ttl_s=5 * HOUR_S))
    await meter.look()
    world.answers = False
    world.now_s = NOON_S + 2 * HOUR_S
    await meter.look()
    assert not world.rows
    world.answers = True
    await meter.look()
    assert world.charged_s() == 2 * HOUR_S


async def test_a_model_without_a_price_for_it_writes_nothing() -> None:
    world = World()
    meter = world.meter()
    world.keep(prefix(model="free"))
    await meter.look()
    world.now_s = NOON_S + 5 * HOUR_S
    await meter.look()
    assert not world.rows


async def test_names_that_end_with_the_process_are_charged_then() -> None:
    world = World()
    meter = world.meter()
    world.keep(prefix(ttl_s=5 * HOUR_S))
    await meter.look()
    world.now_s = NOON_S + 700
    meter.end_all()
    meter.end_all()
    assert world.charged_s() == 700


@settings(max_examples=60, deadline=None)
@given(
    ttl_s=st.integers(60, 20 * 3600),
    made_after_s=st.integers(0, 7200),
    steps=st.lists(
        st.tuples(st.integers(1, 7200), st.sampled_from(["one", "other", "restart"])), max_size=25
    ),
)
async def test_several_gateways_and_restarts_charge_the_time_once(
    ttl_s: int, made_after_s: int, steps: list[tuple[int, str]]
) -> None:
    world = World()
    made_s = NOON_S + made_after_s
    world.now_s = made_s
    kept = prefix(made_s=made_s, ttl_s=ttl_s)
    world.keep(kept)
    meters = {"one": world.meter(), "other": world.meter()}
    for meter in meters.values():
        await meter.look()
    for pause_s, who in steps:
        world.now_s += pause_s
        if who == "restart":
            meters["one"] = world.meter()
        else:
            await meters[who].look()
        assert world.charged_s() <= min(world.now_s - made_s, ttl_s) + 1e-6
    world.now_s = made_s + ttl_s + 1
    await meters["other"].look()
    assert abs(world.charged_s() - ttl_s) < 1e-6
