"""Who holds what, as told, as expected of what was sent there, and as put right by what came."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import Tier
from cache.directory import Directory
from cache.directory_marks import AgingMarks
from cache.directory_table import BlockTable, Slot
from policies.routing import NOTHING_CACHED, Cached
from tests.cache.directory_model import chain_of, of_size, removed, stored, told

PROMPT = chain_of(1, 0, 200)
SHORT = chain_of(2, 0, 20)


def held(directory: Directory, links: list[bytes], now_s: float = 0.0) -> dict[str, int]:
    """Tokens by replica, of blocks of 16."""
    found = directory.lookup({16: links}, now_s)
    return {name: cached.tokens for name, cached in found.items()}


def correct(
    directory: Directory, links: list[bytes], served: int, promised: Cached = NOTHING_CACHED
) -> None:
    """As replica a's answer, to what was decided long after all else."""
    directory.correct("a", links, served, promised=promised, decided_s=50.0, now_s=51.0)


def test_a_block_counts_for_its_fastest_tier():
    directory = Directory()
    directory.join("a", shares_redis="redis")
    directory.join("b", shares_redis="redis")
    everything = (
        stored(PROMPT[:100]),
        stored(PROMPT[90:150], Tier.DRAM),
        stored(PROMPT[120:180], Tier.REDIS),
    )
    assert directory.apply("a", told(1, 1, *everything))
    directory.apply("b", told(9, 1, stored(PROMPT[:130])))
    assert directory.lookup({16: PROMPT}, 0.0) == {
        "a": Cached(device=1600, dram=800, redis=480),
        "b": Cached(device=2080, redis=800),
    }


holdings = st.lists(st.integers(0, 300), min_size=5, max_size=5)


@given(fleet=st.lists(holdings, min_size=1, max_size=12), length=st.integers(60, 300))
@settings(max_examples=60, deadline=None)
def test_every_replicas_end_is_found(fleet: list[list[int]], length: int):
    """Each holds a beginning on the device, goes on in DRAM and then in Redis, and was sent some;
    below lies a part of what is above."""
    links = chain_of(5, 0, length)
    directory = Directory()
    expected = {}
    for number, ends in enumerate(fleet):
        name = f"replica-{number}"
        routed, below, *tiers = ends
        device, dram, redis = sorted(min(end, length) for end in tiers)
        directory.join(name)
        directory.note_routed(name, links[:routed], 0.0)
        in_dram = stored(links[min(below, device) : dram], Tier.DRAM)
        in_redis = stored(links[min(below, dram) : redis], Tier.REDIS)
        directory.apply(name, told(1, 1, stored(links[:device]), in_dram, in_redis))
        device = max(device, min(routed, length))
        dram = max(device, dram)
        redis = max(dram, redis)
        cached = Cached(device * 16, (dram - device) * 16, (redis - dram) * 16)
        if cached != NOTHING_CACHED:
            expected[name] = cached
    assert directory.lookup({16: links}, 0.0) == expected
    directory.check_integrity()


def test_larger_blocks_are_found_by_their_own_links():
    directory = Directory()
    directory.join("small")
    directory.join("large", block_tokens=64)
    directory.apply("small", told(1, 1, stored(PROMPT[:7])))
    directory.apply("large", told(1, 1, stored(of_size(PROMPT, 64)[:30])))
    both = {16: PROMPT, 64: of_size(PROMPT, 64)}
    assert directory.lookup(both, 0.0) == {"small": Cached(112), "large": Cached(1920)}
    assert directory.lookup({16: PROMPT}, 0.0) == {"small": Cached(112)}
    assert directory.lookup({16: PROMPT, 64: []}, 0.0) == {"small": Cached(112)}


def test_a_restart_ends_everything_of_the_life_before():
    directory = Directory()
    directory.join("a")
    directory.apply("a", told(1, 1, stored(PROMPT)))
    directory.note_routed("a", SHORT, 0.0)
    assert directory.apply("a", told(2, 1))
    assert held(directory, PROMPT) == {}
    assert held(directory, SHORT) == {}
    assert directory.apply("a", told(1, 2, stored(PROMPT)))  # late
    assert held(directory, PROMPT) == {}
    assert directory.apply("a", told(2, 2, stored(SHORT)))
    assert held(directory, SHORT) == {"a": 320}


def test_what_was_missed_takes_a_snapshot_to_mend():
    directory = Directory()
    directory.join("a")
    directory.join("b")
    directory.apply("a", told(1, 1, stored(PROMPT)))
    directory.apply("b", told(1, 1, stored(PROMPT)))
    assert not directory.apply("a", told(1, 3, stored(SHORT)))
    assert directory.needs_snapshot("a")
    assert not directory.apply("a", told(1, 4, stored(SHORT)))
    assert held(directory, PROMPT) == {"b": 3200}
    assert held(directory, SHORT) == {}
    assert directory.apply("a", told(1, 4, stored(PROMPT[:10]), snapshot=True))
    assert not directory.needs_snapshot("a")
    assert directory.apply("a", told(1, 4, stored(SHORT)))  # is in the snapshot
    assert directory.apply("a", told(1, 3, stored(SHORT), snapshot=True))  # is late
    assert held(directory, SHORT) == {}
    assert directory.apply("a", told(1, 5, removed(PROMPT[9:10])))
    assert held(directory, PROMPT) == {"a": 144, "b": 3200}
    assert directory.stats().gaps == 1


def test_a_first_batch_that_is_not_the_first_was_missed():
    directory = Directory()
    directory.join("a")
    assert not directory.apply("a", told(1, 7, stored(SHORT)))
    assert held(directory, SHORT) == {}


def test_what_comes_after_the_end_is_passed_over():
    directory = Directory()
    directory.join("a")
    directory.leave("a")
    directory.leave("a")
    assert directory.apply("a", told(1, 1, stored(SHORT)))
    assert directory.note_routed("a", SHORT, 0.0) == len(SHORT)
    correct(directory, SHORT, 320)
    assert not directory.needs_snapshot("a")
    assert directory.blocks == 0


def test_redis_outlives_those_who_wrote_there():
    directory = Directory()
    directory.join("a", shares_redis="redis")
    directory.join("alone")
    directory.apply("a", told(1, 1, stored(PROMPT, Tier.REDIS)))
    directory.apply("alone", told(1, 1, stored(PROMPT, Tier.REDIS)))
    directory.leave("a")
    assert directory.lookup({16: PROMPT}, 0.0) == {"alone": Cached(redis=3200)}
    assert held(directory, PROMPT[:9]) == {"alone": 144}
    directory.leave("alone")
    directory.join("alone")
    directory.join("b", shares_redis="redis")
    directory.join("c", shares_redis="another redis")
    directory.join("larger", shares_redis="redis", block_tokens=32)
    assert directory.lookup({16: PROMPT, 32: PROMPT}, 0.0) == {"b": Cached(redis=3200)}
    assert held(directory, PROMPT[:9]) == {"b": 144}
    directory.join("late", shares_redis="redis")
    assert held(directory, PROMPT[:9]) == {"b": 144, "late": 144}
    directory.leave("late")
    assert directory.stats().redis == {"redis": 200}
    directory.apply("b", told(1, 1, removed(PROMPT[100:], Tier.REDIS)))
    assert held(directory, PROMPT) == {"b": 1600}


def test_what_was_sent_is_expected_there_until_it_is_told_of():
    directory = Directory()
    directory.join("a", ttl_s=4.0)
    directory.apply("a", told(1, 1, stored(PROMPT[:50])))
    assert directory.note_routed("a", PROMPT, 10.0) == 50
    assert directory.lookup({16: PROMPT}, 10.0) == {"a": Cached(3200)}
    assert directory.note_routed("a", PROMPT, 10.5) == 200
    directory.apply("a", told(1, 2, stored(PROMPT[50:90])))
    assert held(directory, PROMPT, 12.9) == {"a": 3200}
    assert held(directory, PROMPT, 14.0) == {"a": 1440}


def test_what_is_told_of_is_not_expected_any_more():
    directory = Directory()
    directory.join("a")
    directory.apply("a", told(1, 1, stored(SHORT[10:])))
    directory.note_routed("a", SHORT, 0.0)
    directory.apply("a", told(1, 2, stored(SHORT[:5])))
    assert directory.stats().replicas["a"].routed == 15
    directory.apply("a", told(1, 3, removed(SHORT[10:])))
    assert directory.stats().replicas["a"].routed == 5
    assert held(directory, SHORT) == {"a": 160}
    assert not directory.apply("a", told(1, 9))
    assert held(directory, SHORT[5:]) == {"a": 80}  # what was sent there is not doubted


def test_places_change_hands():
    directory = Directory()
    names = ["a", "b", "c"]
    for name in names:
        directory.join(name, ttl_s=10.0)
    for turn, name in enumerate(names * 2):
        now_s = 100.0 * turn
        directory.note_routed(name, SHORT, now_s)
        assert held(directory, SHORT, now_s) == {name: 320}
        assert held(directory, SHORT, now_s + 10.0) == {}
        while directory.sweep():
            pass
    for name in names:
        directory.apply(name, told(1, 1, stored(PROMPT)))
        assert held(directory, PROMPT) == {name: 3200}
        directory.leave(name)
        while directory.sweep():
            pass


def test_what_is_sent_again_lives_longer():
    directory = Directory()
    directory.join("a", approximate_blocks=1000, ttl_s=100.0)
    directory.note_routed("a", SHORT, 0.0)
    directory.note_routed("a", PROMPT, 0.0)
    assert directory.note_routed("a", SHORT, 60.0) == 0  # others must hear of it again
    assert held(directory, PROMPT, 74.0) == {"a": 3200}
    assert held(directory, PROMPT, 100.0) == {}
    assert held(directory, SHORT, 134.0) == {"a": 320}
    assert held(directory, SHORT, 160.0) == {}


def test_no_more_is_expected_than_the_replica_can_hold():
    directory = Directory()
    directory.join("a", approximate_blocks=100)
    prompts = [chain_of(10 + number, 0, 10) for number in range(30)]
    for now_s, prompt in enumerate(prompts):
        directory.note_routed("a", prompts[0], float(now_s))  # used all the time
        directory.note_routed("a", prompt, float(now_s))
        assert directory.stats().replicas["a"].routed <= 100
    now_s = float(len(prompts))
    whole = [number for number, prompt in enumerate(prompts) if held(directory, prompt, now_s)]
    assert whole[0] == 0
    assert whole[1:] == list(range(31 - len(whole), 30))
    assert len(whole) >= 7
    assert directory.note_routed("a", PROMPT, now_s) == 0
    assert held(directory, PROMPT, now_s) == {"a": 1600}
    directory.check_integrity()


def test_what_is_used_all_the_time_does_not_split_the_rest_ever_finer():
    table = BlockTable(10_000)
    counting: list[Slot] = []
    marks = AgingMarks(
        table, capacity_blocks=1000, ttl_s=60.0, opened=counting.append, closed=counting.remove
    )
    for turn in range(200):
        marks.make_room(201, 0.0)
        marks.mark(PROMPT + chain_of(100 + turn, 200, 1))
        assert len(counting) <= 8
        table.sweep(100_000)
    assert marks.blocks == 208
    assert table.open_slot().position <= 9
    table.check_integrity()


def test_serving_less_than_promised_shrinks_what_is_expected():
    directory = Directory()
    directory.join("a", approximate_blocks=1000)
    directory.join("b", approximate_blocks=1000)
    directory.note_routed("a", PROMPT, 0.0)
    directory.note_routed("b", PROMPT, 0.0)
    correct(directory, PROMPT, 3200, Cached(3200))
    assert held(directory, PROMPT) == {"a": 3200, "b": 3200}
    correct(directory, PROMPT, 3190, Cached(3200))  # its last token is always computed
    assert held(directory, PROMPT) == {"a": 3200, "b": 3200}
    correct(directory, PROMPT, 330, Cached(3200))
    assert held(directory, PROMPT) == {"a": 320, "b": 3200}
    assert directory.stats().corrections == 1
    assert directory.stats().contradictions == 0


def test_serving_more_than_promised_is_remembered():
    directory = Directory()
    directory.join("a", approximate_blocks=1000)
    correct(directory, PROMPT, 1000)
    assert held(directory, PROMPT, 52.0) == {"a": 992}


def test_a_promise_of_what_is_still_being_computed_refutes_nothing():
    """Many with one new prompt at once: the second is promised what the first only computes."""
    directory = Directory()
    directory.join("a", approximate_blocks=1000)
    decided_s = [1.0, 1.1, 1.2, 9.0]
    for at_s in decided_s[:3]:
        directory.note_routed("a", PROMPT, at_s)
    for at_s, device in zip(decided_s[:3], (0, 3200, 3200), strict=True):
        promised = Cached(device)
        directory.correct("a", PROMPT, 0, promised=promised, decided_s=at_s, now_s=at_s + 2.0)
    assert held(directory, PROMPT, 8.0) == {"a": 3200}
    directory.correct("a", PROMPT, 0, promised=Cached(3200), decided_s=9.0, now_s=10.0)
    assert held(directory, PROMPT, 10.0) == {}


def test_redis_forgets_silently():
    directory = Directory()
    directory.join("a", shares_redis="redis")
    directory.join("b", shares_redis="redis")
    directory.apply("a", told(1, 1, stored(PROMPT[:20]), stored(PROMPT, Tier.REDIS)))
    promised = Cached(device=320, redis=2880)
    assert directory.lookup({16: PROMPT}, 0.0) == {"a": promised, "b": Cached(redis=3200)}
    correct(directory, PROMPT, 160, promised)  # it did not come to asking Redis
    assert held(directory, PROMPT) == {"a": 3200, "b": 3200}
    correct(directory, PROMPT, 800, promised)
    assert held(directory, PROMPT) == {"a": 800, "b": 800}


def test_what_a_replica_told_is_doubted_after_three_broken_promises():
    directory = Directory()
    directory.join("a")
    directory.apply("a", told(1, 1, stored(PROMPT[:150]), stored(PROMPT[150:], Tier.DRAM)))
    promised = Cached(device=2400, dram=800)
    for _ in range(2):
        correct(directory, PROMPT, 800, promised)
    correct(directory, PROMPT, 3200, promised)  # it was right after all
    for _ in range(5):
        correct(directory, PROMPT, 2400, promised)  # computing was faster than loading
    for broken in range(3):
        assert held(directory, PROMPT) == {"a": 3200}, broken
        correct(directory, PROMPT, 800, promised)
    assert held(directory, PROMPT) == {"a": 800}
    assert directory.stats().contradictions == 5
    directory.check_integrity()


def test_a_hole_in_a_long_prompt_promises_too_much_until_it_is_put_right():
    directory = Directory()
    directory.join("a", approximate_blocks=1000)
    directory.note_routed("a", PROMPT[:50], 0.0)
    directory.note_routed("a", PROMPT[60:], 0.0)
    assert held(directory, PROMPT) == {"a": 3200}
    correct(directory, PROMPT, 800, Cached(3200))
    assert held(directory, PROMPT) == {"a": 800}


def test_memory_comes_back_by_sweeping():
    directory = Directory()
    for name in ("a", "b"):
        directory.join(name)
    empty = directory.stats().bytes_estimate
    prompts = [chain_of(number, 0, 500) for number in range(40)]
    for seq, prompt in enumerate(prompts, 1):
        directory.apply("a", told(1, seq, stored(prompt)))
        directory.apply("b", told(1, seq, stored(prompt[:10])))
    full = directory.stats()
    assert full.blocks == 20_000
    directory.leave("a")
    assert directory.stats().unswept_slots == 1
    steps = 0
    while directory.sweep(1000):
        steps += 1
    assert 20 <= steps <= 23
    swept = directory.stats()
    assert (swept.blocks, swept.unswept_slots) == (400, 0)
    assert swept.bytes_estimate - empty < (full.bytes_estimate - empty) / 10
    assert held(directory, prompts[7]) == {"b": 160}
    directory.check_integrity()


def test_forgotten_places_are_taken_again_without_being_swept_by_anybody():
    directory = Directory()
    directory.join("other")
    directory.apply("other", told(1, 1, stored(PROMPT)))
    directory.join("a")
    for epoch in range(1, 400):
        directory.apply("a", told(epoch, 1, stored(chain_of(epoch, 0, 30))))
        assert directory.stats().unswept_slots <= 80
    assert directory.blocks < 200 + 80 * 30
    assert held(directory, PROMPT) == {"other": 3200}


def test_a_full_directory_refuses_and_counts():
    directory = Directory(max_blocks=100)
    directory.join("a")
    directory.apply("a", told(1, 1, stored(PROMPT[:120])))
    assert directory.stats().refused == 20
    assert held(directory, PROMPT) == {"a": 1600}
    directory.apply("a", told(1, 2, stored(PROMPT[:100], Tier.DRAM)))  # known already
    assert directory.stats().refused == 20
    directory.check_integrity()


def test_redis_that_nobody_can_load_from_goes_when_there_is_no_room():
    directory = Directory(max_blocks=100)
    directory.join("gone", shares_redis="old redis")
    directory.apply("gone", told(1, 1, stored(SHORT, Tier.REDIS)))
    directory.leave("gone")
    directory.join("a", shares_redis="redis")
    directory.apply("a", told(1, 1, stored(PROMPT[:90])))
    assert directory.stats().redis == {}
    while directory.sweep():
        pass
    assert directory.blocks == 80
    directory.apply("a", told(1, 2, stored(PROMPT[80:100])))
    assert held(directory, PROMPT) == {"a": 1600}


def test_redis_takes_at_most_half_the_room():
    directory = Directory(max_blocks=200)
    directory.join("a", shares_redis="redis")
    for seq in range(1, 30):
        directory.apply("a", told(1, seq, stored(chain_of(seq, 0, 10), Tier.REDIS)))
    assert directory.stats().redis["redis"] <= 100
    assert held(directory, chain_of(29, 0, 10)) == {"a": 160}
    assert held(directory, chain_of(1, 0, 10)) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": "there"},
        {"block_tokens": 24},
        {"block_tokens": 0},
        {"approximate_blocks": 0},
        {"ttl_s": 0.0},
    ],
)
def test_who_cannot_be_tracked_does_not_join(wrong):
    directory = Directory()
    directory.join("there")
    with pytest.raises(ValueError, match=r"."):
        directory.join(**{"replica": "new", **wrong})
    assert directory.stats().replicas.keys() == {"there"}
