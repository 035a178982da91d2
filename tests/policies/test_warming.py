"""When a second replica gets a copy, and which."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing import Cached, Candidate, Standing
from policies.warming import HotPrefix, Warming, WarmUp, occupied_s
from tests.policies.fleet_simulation import BUNDLED

HOT = HotPrefix(b"hot", 1024)
WORK_S = occupied_s(BUNDLED, 64, 1024, 32)
HELD, IN_DRAM, IN_REDIS = Cached(device=1024), Cached(dram=1024), Cached(dram=512, redis=512)


def replica(
    name: str, cached: Cached, *, full: bool = False, reuse: float = 1.0, cost=BUNDLED
) -> Candidate:
    return Candidate(name, cost, Standing(full=full, reuse=reuse), cached)


def pair(cached: Cached = IN_DRAM) -> list[Candidate]:
    return [replica("holder", HELD), replica("second", cached)]


class Traffic:
    """Requests with one prefix, evenly spaced, all of them to the holder."""

    def __init__(self, warming: Warming, prefix: HotPrefix = HOT, now_s: float = 0.0) -> None:
        self.warming = warming
        self.prefix = prefix
        self.now_s = now_s

    def run(
        self, per_s: float, seconds: float, candidates: list[Candidate], replica: str = "holder"
    ) -> WarmUp | None:
        """Until something is proposed."""
        for _ in range(round(per_s * seconds)):
            self.now_s += 1 / per_s
            self.warming.routed(self.prefix, replica, WORK_S, self.now_s)
            found = self.warming.propose(self.prefix, candidates, self.now_s, Random(1))
            if found is not None:
                return found
        return None


def test_work_is_the_prefill_and_a_row_in_each_step() -> None:
    assert pytest.approx(20.05e-3 + 32 * 525e-6, rel=0.02) == WORK_S


@pytest.mark.parametrize("per_s", [0.1, 1.0, 4.0])
def test_nothing_is_loaded_where_nothing_waits(per_s: float) -> None:
    assert Traffic(Warming()).run(per_s, 100.0, pair()) is None


@given(utilisation=st.floats(0.001, 0.15), reuse=st.floats(0.5, 1.0))
@settings(max_examples=20, deadline=None)
def test_an_idle_fleet_is_left_alone(utilisation: float, reuse: float) -> None:
    candidates = [replica("holder", HELD), replica("second", IN_DRAM, reuse=reuse)]
    assert Traffic(Warming()).run(utilisation / WORK_S, 40.0, candidates) is None


def test_a_rising_prefix_is_loaded_before_its_queue_forms() -> None:
    warming = Warming()
    traffic = Traffic(warming)
    found = None
    per_s = 1.0
    while found is None:
        per_s += 0.5
        found = traffic.run(per_s, 1.0, pair())
        assert per_s * WORK_S < 0.95
    assert found == WarmUp(HOT, "dram", "second")
    assert warming.utilisation("holder", traffic.now_s) < 0.7


def test_the_source_is_the_lowest_tier_that_is_needed() -> None:
    found = Traffic(Warming()).run(20.0, 20.0, pair(IN_REDIS))
    assert found == WarmUp(HOT, "redis", "second")


@pytest.mark.parametrize(
    "second",
    [
        replica("second", Cached()),
        replica("second", Cached(dram=512)),
        replica("second", IN_DRAM, full=True),
        replica("second", IN_REDIS, cost=BUNDLED._replace(redis_block_s=10e-3)),
        replica("second", HELD),
    ],
    ids=["nothing", "half", "full", "slower than computing", "has it"],
)
def test_who_is_no_target(second: Candidate) -> None:
    assert Traffic(Warming()).run(20.0, 20.0, [replica("holder", HELD), second]) is None


def test_one_at_a_time() -> None:
    warming = Warming()
    traffic = Traffic(warming)
    three = [*pair(), replica("third", IN_DRAM)]
    first = traffic.run(20.0, 20.0, three)
    assert first is not None
    began_s = traffic.now_s
    assert traffic.run(20.0, 5.0, three) is None
    # another prefix does not get the same target meanwhile
    other = Traffic(warming, HotPrefix(b"other", 1024), traffic.now_s)
    candidates = [replica("holder", HELD), replica(first.target, IN_DRAM)]
    assert other.run(20.0, 3.0, candidates) is None
    warming.done(first)
    traffic.now_s = other.now_s
    # it did not work: another target at once, the same not within a horizon
    second = traffic.run(20.0, 0.5, three)
    assert second is not None
    assert second.target != first.target
    warming.done(second)
    third = traffic.run(20.0, 20.0, three)
    assert third is not None
    assert traffic.now_s - began_s >= 10.0


def test_an_end_that_is_never_told_is_taken_for_granted_after_a_horizon() -> None:
    warming = Warming()
    traffic = Traffic(warming)
    first = traffic.run(20.0, 20.0, pair())
    assert first is not None
    began_s = traffic.now_s
    assert traffic.run(20.0, 20.0, pair()) is not None
    assert traffic.now_s - began_s >= 10.0
    warming.done(first)  # too late: it is the second that is under way
    third = [*pair(), replica("third", IN_DRAM)]
    assert traffic.run(20.0, 5.0, third) is None


def test_a_copy_lowers_what_the_next_would_save() -> None:
    warming = Warming()
    traffic = Traffic(warming)
    three = [*pair(), replica("third", IN_DRAM)]
    per_s = 0.35 / WORK_S
    found = traffic.run(per_s, 60.0, three)
    assert found is not None
    warming.done(found)
    held = [
        replica(one.name, HELD if one.name in ("holder", found.target) else IN_DRAM)
        for one in three
    ]
    for _ in range(30):  # what both holders share by turns is no reason for a third
        assert traffic.run(per_s / 2, 1.0, held) is None
        assert traffic.run(per_s / 2, 1.0, held, replica=found.target) is None


LOADS = st.integers(0, 500).map(lambda thousandths: thousandths / 1000)
"""Not any float: of the smallest, the work of a tick is none at all."""


@given(loads=st.lists(LOADS, min_size=2, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_target_is_the_one_with_least_to_do(loads: list[float], seed: int) -> None:
    warming = Warming()
    names = [f"replica-{index}" for index in range(len(loads))]
    for tick in range(200):
        now_s = tick * 0.2
        for name, load in zip(names, loads, strict=True):
            warming.routed(None, name, load * 0.2, now_s)
        for _ in range(8):
            warming.routed(HOT, "holder", WORK_S, now_s)
    candidates = [replica("holder", HELD), *(replica(name, IN_DRAM) for name in names)]
    found = warming.propose(HOT, candidates, 40.0, Random(seed))
    assert found is not None
    assert loads[names.index(found.target)] == min(loads)


def test_it_stays_small() -> None:
    warming = Warming(prefixes=100)
    for tick in range(3000):
        prefix = HotPrefix(str(tick).encode(), 64)
        warming.routed(prefix, f"replica-{tick}", 0.01, now_s=float(tick))
        assert warming.watched <= 100
    assert len(warming._busy) <= 202  # those of the last 20 horizons
    warming.done(WarmUp(HOT, "dram", "gone"))  # of one that is not watched any more


def test_overload_is_told_from_more_overload() -> None:
    """Two holders of which each has more than it can do are relieved by a third all the same."""
    warming = Warming()
    for tick in range(400):
        for name in ("a", "b"):
            for _ in range(4):
                warming.routed(HOT, name, WORK_S, tick * 0.1)
    candidates = [replica("a", HELD), replica("b", HELD), replica("c", IN_DRAM)]
    assert warming.utilisation("a", 40.0) > 1.3
    assert warming.propose(HOT, candidates, 40.0, Random(1)) == WarmUp(HOT, "dram", "c")
