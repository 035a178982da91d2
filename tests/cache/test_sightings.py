"""What is remembered of blocks, and why one is missing."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import NOBODY, BlockKey, Owner, Tier
from cache.hashing import extend_chain
from cache.report import Miss
from cache.sightings import Sightings

BLOCK = 16
ACME = Owner(b"acme....", b"........")
ACME_ANN = Owner(b"acme....", b"ann.....")
OTHER = Owner(b"other...", b"........")


def keys_of(tokens: list[int], owner: Owner = ACME, salt: bytes = b"") -> list[BlockKey]:
    """Keys of the full blocks of a prompt; owner and salt make the chain's root."""
    keys: list[BlockKey] = []
    parent = (owner.tenant + owner.scope + salt).ljust(16, b"\0")
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = b"".join(t.to_bytes(4, "little") for t in tokens[start : start + BLOCK])
        link = extend_chain(parent, block)
        keys.append(BlockKey(link, parent, block, start, owner))
        parent = link
    return keys


def text(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def test_sightings_are_counted_once_per_request():
    sightings = Sightings()
    keys = keys_of(text(4))
    sightings.see(keys)
    sightings.see(keys[:2])
    assert [sightings.times_seen(key) for key in keys] == [2, 2, 1, 1]
    assert sightings.times_seen(keys_of(text(1, 500))[0]) == 0
    sightings.see([])


def test_a_block_comes_back_once_from_the_tier_it_was_pushed_out_of():
    sightings = Sightings()
    key, unseen = keys_of(text(2))
    sightings.see([key])
    assert sightings.came_back(key) is None
    sightings.pushed_out(key, Tier.DEVICE)
    sightings.pushed_out(unseen, Tier.DRAM)
    assert sightings.came_back(key) is Tier.DEVICE
    assert sightings.came_back(key) is None
    assert sightings.came_back(unseen) is Tier.DRAM
    assert sightings.times_seen(unseen) == 0


def test_every_push_has_one_outcome():
    forgotten: list[tuple[BlockKey, Tier]] = []
    sightings = Sightings(4, on_forgotten=lambda key, tier: forgotten.append((key, tier)))
    keys = keys_of(text(4))
    sightings.see(keys)
    sightings.pushed_out(keys[3], Tier.DEVICE)
    sightings.pushed_out(keys[2], Tier.DEVICE)
    sightings.pushed_out(keys[2], Tier.DRAM)  # what was watched for the device ends
    assert forgotten == [(keys[2], Tier.DEVICE)]
    assert sightings.came_back(keys[3]) is Tier.DEVICE
    sightings.see(keys_of(text(4, 100)))
    assert forgotten == [(keys[2], Tier.DEVICE), (keys[2], Tier.DRAM)]
    assert len(sightings) == 4


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning():
    sightings = Sightings(6)
    keys = keys_of(text(4))
    sightings.see(keys)
    sightings.see(keys_of(text(4, 100)))
    assert [sightings.times_seen(key) for key in keys] == [1, 1, 0, 0]


def test_long_blocks_are_fewer():
    sightings = Sightings(32_768)
    for number in range(20):
        sightings.see([BlockKey(number.to_bytes(16), b"", bytes(1 << 20))])
    assert len(sightings) == 8


@pytest.mark.parametrize("seen_before_asking", [False, True])
class TestWhyMissing:
    """The answer is the same before and after `see` of the prompt that asks."""

    def why(self, sightings: Sightings, keys: list[BlockKey], index: int, seen: bool):
        if seen:
            sightings.see(keys)
        return sightings.why_missing(keys, index)

    def test_never_seen(self, seen_before_asking):
        sightings = Sightings()
        for index in (0, 2):
            answer = self.why(sightings, keys_of(text(3)), index, seen_before_asking)
            assert answer == (Miss.NEVER_SEEN, None)

    def test_pushed_out(self, seen_before_asking):
        sightings = Sightings()
        keys = keys_of(text(3))
        sightings.see(keys)
        sightings.pushed_out(keys[1], Tier.DRAM)
        sightings.came_back(keys[1])
        assert self.why(sightings, keys, 1, seen_before_asking) == (Miss.EVICTED, None)
        assert self.why(sightings, keys, 0, seen_before_asking) == (Miss.NEVER_SEEN, None)

    def test_diverged_from_the_most_similar_known_prompt(self, seen_before_asking):
        sightings = Sightings()
        for at in (17, 21, 19):
            known = text(3)
            known[at] = 9999
            sightings.see(keys_of(known))
        asked = keys_of(text(3))
        assert self.why(sightings, asked, 1, seen_before_asking) == (Miss.DIVERGED, 21)
        assert self.why(sightings, asked, 2, seen_before_asking) == (Miss.NEVER_SEEN, None)

    def test_diverged_right_at_a_block(self, seen_before_asking):
        sightings = Sightings()
        sightings.see(keys_of(text(1) + text(1, 500)))
        asked = keys_of(text(1) + text(1, 700))
        assert self.why(sightings, asked, 1, seen_before_asking) == (Miss.DIVERGED, 16)

    def test_another_prompt_that_shares_no_token_is_no_divergence(self, seen_before_asking):
        sightings = Sightings()
        sightings.see(keys_of(text(2, 500)))
        answer = self.why(sightings, keys_of(text(2)), 0, seen_before_asking)
        assert answer == (Miss.NEVER_SEEN, None)

    def test_a_longer_prompt_than_known_is_no_divergence(self, seen_before_asking):
        sightings = Sightings()
        sightings.see(keys_of(text(2)))
        answer = self.why(sightings, keys_of(text(3)), 2, seen_before_asking)
        assert answer == (Miss.NEVER_SEEN, None)

    def test_the_same_text_of_somebody_else(self, seen_before_asking):
        sightings = Sightings()
        sightings.see(keys_of(text(3)))
        begins_alike = text(3)
        begins_alike[5] = 9999
        sightings.see(keys_of(begins_alike, OTHER))
        for salted in (keys_of(text(4), OTHER), keys_of(text(4), ACME, b"salt")):
            for index in (0, 2):
                answer = self.why(sightings, salted, index, seen_before_asking)
                assert answer == (Miss.OTHER_SALT, None)

    def test_the_same_block_behind_other_text_is_not_the_same_text(self, seen_before_asking):
        sightings = Sightings()
        sightings.see(keys_of(text(1, 900) + text(1)))
        answer = self.why(sightings, keys_of(text(1, 700) + text(1), OTHER), 1, seen_before_asking)
        assert answer == (Miss.NEVER_SEEN, None)

    def test_erased_is_forgotten(self, seen_before_asking):
        sightings = Sightings()
        ann, all_of_acme, other = (keys_of(text(2), o) for o in (ACME_ANN, ACME, OTHER))
        for keys in (ann, all_of_acme, other):
            sightings.see(keys)
            sightings.pushed_out(keys[0], Tier.DEVICE)
        sightings.erase(ACME.tenant, ACME_ANN.scope)
        assert [sightings.times_seen(k[0]) for k in (ann, all_of_acme, other)] == [0, 1, 1]
        sightings.erase(ACME.tenant, None)
        assert [sightings.times_seen(k[0]) for k in (ann, all_of_acme, other)] == [0, 0, 1]
        sightings.erase(OTHER.tenant, None)
        assert len(sightings) == 0
        assert self.why(sightings, ann, 0, seen_before_asking) == (Miss.NEVER_SEEN, None)

    def test_a_shared_prefix_goes_on_for_each_tenant(self, seen_before_asking):
        sightings = Sightings()
        shared = keys_of(text(1), NOBODY)
        parent = b"resalted for ac."
        own = [
            BlockKey(bytes([n] * 16), parent, bytes(4 * n) + b"\1" * (64 - 4 * n), 16, ACME)
            for n in (3, 5)
        ]
        sightings.see([*shared, own[0]])
        answer = self.why(sightings, [*shared, own[1]], 1, seen_before_asking)
        assert answer == (Miss.DIVERGED, 16 + 3)


PROMPTS = [
    keys_of([branch * 10 + (block >= cut) * branch for block in range(3) for _ in range(BLOCK)], o)
    for o in (ACME, ACME_ANN, OTHER)
    for branch in (1, 2)
    for cut in (1, 2)
]
EVENTS = st.one_of(
    st.tuples(st.just("see"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 3)),
    st.tuples(st.just("push"), st.integers(0, len(PROMPTS) - 1), st.integers(0, 2)),
    st.tuples(st.just("back"), st.integers(0, len(PROMPTS) - 1), st.integers(0, 2)),
    st.tuples(st.just("erase"), st.sampled_from([0, 1, 2]), st.booleans()),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.integers(3, 20))
def test_it_agrees_with_a_plain_dictionary(events, capacity):
    forgotten: list[tuple[bytes, Tier]] = []
    expected: list[tuple[bytes, Tier]] = []
    sightings = Sightings(
        capacity, on_forgotten=lambda key, tier: forgotten.append((key.link, tier))
    )
    seen: OrderedDict[bytes, int] = OrderedDict()
    marks: dict[bytes, Tier] = {}
    owners: dict[bytes, Owner] = {}

    def forget_surplus() -> None:
        while len(seen) > capacity:
            link, _ = seen.popitem(last=False)
            if link in marks:
                expected.append((link, marks.pop(link)))

    for kind, which, much in events:
        if kind == "see":
            keys = PROMPTS[which][:much]
            sightings.see(keys)
            for key in reversed(keys):
                seen[key.link] = seen.get(key.link, 0) + 1
                seen.move_to_end(key.link)
                owners[key.link] = key.owner
            forget_surplus()
        elif kind == "push":
            key, tier = PROMPTS[which][much], (Tier.DEVICE, Tier.DRAM)[which % 2]
            sightings.pushed_out(key, tier)
            if key.link in marks:
                expected.append((key.link, marks[key.link]))
            seen.setdefault(key.link, 0)
            seen.move_to_end(key.link)
            marks[key.link] = tier
            owners[key.link] = key.owner
            forget_surplus()
        elif kind == "back":
            key = PROMPTS[which][much]
            assert sightings.came_back(key) is marks.pop(key.link, None)
        else:
            owner = (ACME, ACME_ANN, OTHER)[which]
            sightings.erase(owner.tenant, owner.scope if much else None)
            for link in [
                link
                for link in seen
                if owners[link].tenant == owner.tenant
                and (not much or owners[link].scope == owner.scope)
            ]:
                del seen[link]
                marks.pop(link, None)
        assert len(sightings) == len(seen)
        assert forgotten == expected
    for keys in PROMPTS:
        assert [sightings.times_seen(key) for key in keys] == [seen.get(k.link, 0) for k in keys]
        for index in range(3):
            miss, diverged_at = sightings.why_missing(keys, index)
            assert (diverged_at is not None) == (miss is Miss.DIVERGED)
            if diverged_at is not None:
                assert keys[index].start <= diverged_at < keys[index].start + BLOCK
    sightings.erase(None, None)
    assert len(sightings) == 0
    assert all(sightings.why_missing(k, 2) == (Miss.NEVER_SEEN, None) for k in PROMPTS)


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(ValueError, match="capacity"):
        Sightings(0)
