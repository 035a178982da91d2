"""What a vLLM tells of its cache, followed in our own terms, whatever is missing or strange."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import Tier
from cache.block_events import BlockEvents
from cache.directory import Directory
from cache.prompt_links import prompt_links, token_bytes_of
from cache.vllm_events import Untracked, VllmRehasher
from cache.vllm_messages import decode_batch
from tests.cache.event_mirror import Mirror
from tests.cache.fake_vllm import CLEARED, FORMS, FakeVllm, Form, message, removed, stored

ROOTS = {"salt-a": b"a" * 16, "salt-b": b"b" * 16}
TOKENS = list(range(1000, 1100))


def links_of(salt: str, token_ids: list[int], block_tokens: int = 16) -> tuple[bytes, ...]:
    return prompt_links(ROOTS[salt], token_bytes_of(token_ids), block_tokens=block_tokens)


class Listener:
    """A rehasher, and what somebody who listens to it believes."""

    def __init__(self, **options: Any) -> None:
        self.rehasher = VllmRehasher(ROOTS.get, **options)
        self.mirror = Mirror()
        self.batches: list[BlockEvents] = []

    def hear(self, events: list[dict[str, Any]], form: Form = "map") -> None:
        batch = decode_batch(message(events, form))
        assert not batch.malformed
        for told in self.rehasher.follow(batch.events):
            self.take(told)
        self.rehasher.check_integrity()

    def take(self, told: BlockEvents) -> None:
        if told.epoch != self.mirror.epoch:
            self.mirror = Mirror()
        if not self.mirror.batches:
            assert told.snapshot, "a life begins with a snapshot"
        self.mirror.apply(told)
        self.batches.append(told)

    @property
    def device(self) -> set[bytes]:
        return self.mirror.held[Tier.DEVICE]


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("integers", [False, True])
def test_a_prompt_is_found_under_its_tenants_links(form: Form, integers: bool) -> None:
    vllm, listener = FakeVllm(integers=integers), Listener()
    vllm.serve("salt-a", TOKENS[:64])
    vllm.serve("salt-a", TOKENS)  # goes on from the first
    vllm.serve("salt-b", TOKENS[:32])
    listener.hear(vllm.take(), form)
    assert listener.device == {*links_of("salt-a", TOKENS), *links_of("salt-b", TOKENS[:32])}
    assert listener.rehasher.block_tokens == 16
    assert listener.rehasher.tracked == 8
    assert not listener.rehasher.untracked


def test_the_directory_answers_from_it() -> None:
    directory, listener = Directory(), Listener()
    directory.join("remote", block_tokens=32)
    vllm = FakeVllm(block_size=32)
    vllm.serve("salt-a", TOKENS[:96])
    listener.hear(vllm.take())
    assert all(directory.apply("remote", told) for told in listener.batches)
    asked = {32: links_of("salt-a", TOKENS[:80], 32)}
    assert directory.lookup(asked, 0.0)["remote"].device == 64
    assert directory.lookup({32: links_of("salt-b", TOKENS, 32)}, 0.0) == {}


def test_large_blocks_have_the_link_of_their_last_part() -> None:
    vllm, listener = FakeVllm(block_size=48), Listener()
    vllm.serve("salt-a", TOKENS)
    listener.hear(vllm.take())
    assert listener.device == set(links_of("salt-a", TOKENS)[2::3])
    assert listener.rehasher.block_tokens == 48


def test_a_version_that_does_not_say_the_salt_is_not_followed() -> None:
    vllm, listener = FakeVllm(), Listener()
    vllm.serve("salt-a", TOKENS[:32])
    vllm.serve("salt-a", TOKENS[:64])
    listener.hear(vllm.take(), "oldest")
    listener.hear([removed([1]), CLEARED], "oldest")
    assert not listener.device
    assert listener.rehasher.untracked == {Untracked.UNSALTED: 1, Untracked.PARENT: 3}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lora_id": 3}, Untracked.ADAPTER),
        ({"lora_name": "tuned"}, Untracked.ADAPTER),
        ({"medium": "STORAGE"}, Untracked.MEDIUM),
        ({"medium": ["GPU"]}, Untracked.MEDIUM),
        ({"locality": "REMOTE"}, Untracked.MEDIUM),
        ({"kv_cache_spec_kind": "sliding_window"}, Untracked.LAYERS),
        ({"kv_cache_spec_kind": ["?"]}, Untracked.LAYERS),
        ({"extra_keys": [None]}, Untracked.UNSALTED),
        ({"extra_keys": None}, Untracked.UNSALTED),
        ({"extra_keys": "salt-a"}, Untracked.UNSALTED),
        ({"extra_keys": [("another's",)]}, Untracked.SALT),
        ({"extra_keys": [("salt-a", ("image", 3))]}, Untracked.CONTENT),
        ({"extra_keys": [(b"salt-a",)]}, Untracked.CONTENT),
        ({"extra_keys": [{"salt-a": 1}]}, Untracked.CONTENT),
        ({"block_size": 8, "token_ids": TOKENS[:8]}, Untracked.BLOCK_SIZE),
        ({"block_size": 0, "token_ids": []}, Untracked.BLOCK_SIZE),
        ({"block_size": -16}, Untracked.BLOCK_SIZE),
        ({"token_ids": TOKENS[:15]}, Untracked.CONTENT),
        ({"token_ids": []}, Untracked.CONTENT),
        ({"parent_block_hash": b"never seen", "extra_keys": None}, Untracked.PARENT),
        ({"parent_block_hash": b"x", "extra_keys": None}, Untracked.PARENT),
        ({"parent_block_hash": 5}, Untracked.CONTENT),
    ],
)
def test_what_says_too_little_is_counted(fields: dict[str, Any], reason: Untracked) -> None:
    listener = Listener()
    listener.hear([stored([b"x"], None, TOKENS[:16], salt="salt-a") | fields])
    assert listener.rehasher.untracked == {reason: 1}
    assert not listener.batches
    # neither is what extends it, but what says enough is
    listener.hear([stored([b"y"], b"x", TOKENS[16:32])])
    assert not listener.batches
    listener.hear([stored([b"z"], None, TOKENS[:16], salt="salt-a")])
    assert listener.device == set(links_of("salt-a", TOKENS[:16]))


def test_a_salt_may_be_tagged_as_one() -> None:
    listener = Listener()
    event = stored([b"x"], None, TOKENS[:16])
    listener.hear([event | {"extra_keys": [(("cache_salt", "salt-a"),)]}])
    assert listener.device == set(links_of("salt-a", TOKENS[:16]))


def test_a_block_is_there_under_its_last_name() -> None:
    vllm, listener = FakeVllm(lookahead=1), Listener()
    first, second = [*TOKENS[:32], 1, *TOKENS[:20]], [*TOKENS[:32], 2]
    vllm.serve("salt-a", first)
    vllm.serve("salt-a", second)
    listener.hear(vllm.take())
    one, other = vllm.names("salt-a", first)[1], vllm.names("salt-a", second)[1]
    assert one != other
    assert listener.device == set(links_of("salt-a", first))
    vllm.evict(other)
    listener.hear(vllm.take())
    assert listener.device == set(links_of("salt-a", first))
    vllm.evict(one)
    listener.hear(vllm.take())
    assert links_of("salt-a", first)[1] not in listener.device


def test_images_end_what_is_followed() -> None:
    listener = Listener()
    event = stored([b"x", b"y", b"z"], None, TOKENS[:48], salt="salt-a")
    event["extra_keys"][1] = [("image", 0)]
    listener.hear([event])
    assert listener.device == set(links_of("salt-a", TOKENS[:16]))
    assert listener.rehasher.untracked == {Untracked.CONTENT: 1, Untracked.PARENT: 1}


def test_another_block_size_is_not_mixed_in() -> None:
    listener = Listener()
    listener.hear([stored([b"x"], None, TOKENS[:32], salt="salt-a", block_size=32)])
    listener.hear([stored([b"y"], b"x", TOKENS[32:48])])
    assert listener.device == set(links_of("salt-a", TOKENS[:32], 32))
    assert listener.rehasher.untracked == {Untracked.BLOCK_SIZE: 1}


def test_other_layers_tell_of_the_same_blocks_in_vain() -> None:
    listener = Listener()
    first = stored([b"x"], None, TOKENS[:16], salt="salt-a")
    listener.hear([first, first | {"group_idx": 1}, removed([b"x"], group_idx=1)])
    assert listener.device == set(links_of("salt-a", TOKENS[:16]))
    assert listener.rehasher.untracked == {Untracked.LAYERS: 1}
    listener.hear([removed([b"x"], group_idx=None)])
    assert not listener.device


def test_a_block_is_there_until_its_last_copy_goes() -> None:
    vllm, listener = FakeVllm(), Listener()
    vllm.serve("salt-a", TOKENS[:32])
    vllm.serve("salt-a", TOKENS[:32], twice=1)
    last = vllm.names("salt-a", TOKENS[:32])[-1]
    vllm.evict(last)
    listener.hear(vllm.take())
    assert listener.device == set(links_of("salt-a", TOKENS[:32]))
    vllm.evict(last)
    listener.hear(vllm.take())
    assert listener.device == set(links_of("salt-a", TOKENS[:16]))


def test_offloaded_blocks_are_in_dram_though_they_say_nothing_of_their_tokens() -> None:
    vllm, listener = FakeVllm(), Listener()
    vllm.serve("salt-a", TOKENS[:32])
    names = vllm.names("salt-a", TOKENS[:32])
    listener.hear(vllm.take())
    offloaded = stored(names, None, [], medium="CPU", block_size=0, group_idx=None)
    listener.hear([removed(names), offloaded])
    assert not listener.device
    assert listener.mirror.held[Tier.DRAM] == set(links_of("salt-a", TOKENS[:32]))
    listener.hear([removed(names[1:], medium="CPU", group_idx=None)])
    assert listener.mirror.held[Tier.DRAM] == set(links_of("salt-a", TOKENS[:16]))


def test_clearing_takes_everything_back_but_not_what_comes_after_it() -> None:
    vllm, listener = FakeVllm(), Listener()
    vllm.serve("salt-a", TOKENS)
    listener.hear(vllm.take())
    vllm.serve("salt-b", TOKENS)
    vllm.clear()
    vllm.serve("salt-a", TOKENS[:16])
    listener.hear(vllm.take())
    assert listener.device == set(links_of("salt-a", TOKENS[:16]))


def test_after_a_gap_a_new_block_proves_what_it_extends() -> None:
    vllm, listener = FakeVllm(), Listener()
    vllm.serve("salt-a", TOKENS[:64])
    vllm.serve("salt-b", TOKENS[:64])
    listener.hear(vllm.take())
    listener.take(listener.rehasher.forget_told())
    assert not listener.device
    vllm.serve("salt-a", TOKENS[:80])
    listener.hear(vllm.take())
    assert listener.device == set(links_of("salt-a", TOKENS[:80]))


def test_a_new_life_has_other_hashes_and_may_have_other_blocks() -> None:
    vllm, listener = FakeVllm(), Listener()
    vllm.serve("salt-a", TOKENS)
    listener.hear(vllm.take())
    listener.take(listener.rehasher.begin_life())
    assert not listener.device
    again = FakeVllm(life=1, block_size=32)
    again.serve("salt-a", TOKENS)
    again.evict(again.names("salt-a", TOKENS)[-1])
    listener.hear([removed(vllm.names("salt-a", TOKENS)), *again.take()])
    assert listener.device == set(links_of("salt-a", TOKENS, 32)[:-1])
    assert listener.mirror.epoch == 2


def test_blocks_that_extend_each_other_in_a_circle_end_nothing() -> None:
    listener = Listener(max_blocks=2)
    listener.hear([stored([b"a", b"b"], None, TOKENS[:32], salt="salt-a")])
    listener.hear([removed([b"a"]), stored([b"c"], None, TOKENS[:16], salt="salt-b")])
    listener.hear([removed([b"c"]), stored([b"a"], b"b", TOKENS[:16])])
    listener.take(listener.rehasher.forget_told())
    listener.hear([stored([b"d"], b"b", TOKENS[:16])])
    assert len(listener.device) == 2


def test_what_is_remembered_is_bounded() -> None:
    vllm, listener = FakeVllm(), Listener(max_blocks=10)
    for start in range(40):
        vllm.serve("salt-a", [start, *TOKENS[:47]])
    vllm.evict(vllm.names("salt-a", [39, *TOKENS[:47]])[-1])
    listener.hear(vllm.take())
    assert len(listener.device) == 9  # one of ten has gone, and its hash is known yet
    listener.hear([stored([b"x"], None, TOKENS[:16], salt="salt-a")])
    assert len(listener.device) == 10
    listener = Listener(max_blocks=1)
    listener.hear([stored([b"x"], None, TOKENS[:16], salt="salt-a")] * 3)
    listener.hear([stored([b"y"], None, TOKENS[:16], salt="salt-b")])
    assert listener.device == set(links_of("salt-b", TOKENS[:16]))
    with pytest.raises(ValueError, match="at least 1"):
        VllmRehasher(ROOTS.get, max_blocks=0)


def test_a_long_message_comes_in_pieces() -> None:
    token_ids = list(range(16 * 700))
    vllm, listener = FakeVllm(), Listener()
    vllm.serve("salt-a", token_ids)
    listener.hear(vllm.take())
    assert listener.device == set(links_of("salt-a", token_ids))
    assert max(len(told.changes[0].stored) for told in listener.batches) <= 256
    assert listener.rehasher.tracked == 700


_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from([*["serve"] * 3, *["evict"] * 2, "clear", "gap"]), st.integers(0, 1 << 30)
    ),
    max_size=40,
)


class Traffic:
    """Prompts that begin alike, and what becomes of their blocks."""

    def __init__(self, vllm: FakeVllm) -> None:
        self.vllm = vllm
        self._served: set[tuple[str, tuple[int, ...]]] = set()

    def happen(self, what: str, seed: int) -> None:
        draw = random.Random(seed)
        if what == "serve":
            salt = draw.choice(["salt-a", "salt-b", "unknown", None])
            parts_way = draw.choice([0, 16, 20, 32, 48])
            token_ids = [*range(parts_way), draw.choice([1, 2]), *range(draw.choice([15, 40, 70]))]
            self.vllm.serve(salt, token_ids, twice=draw.choice([0, 0, 1, 3]))
            if salt in ROOTS:
                self._served.add((str(salt), tuple(token_ids)))
        elif what == "evict" and self.vllm.copies:
            self.vllm.evict(draw.choice(list(self.vllm.copies)))
        elif what == "clear":
            self.vllm.clear()

    def there(self) -> set[bytes]:
        """The links of all that is there and can be told of."""
        links = set()
        for salt, token_ids in self._served:
            names = self.vllm.names(salt, token_ids)
            for name, link in zip(names, links_of(salt, list(token_ids)), strict=False):
                if self.vllm.copies[name]:
                    links.add(link)
        return links


@settings(max_examples=60, deadline=None)
@given(_OPERATIONS, st.sampled_from(FORMS[1:]), st.booleans(), st.integers(0, 2))
def test_without_losses_exactly_what_is_there_is_told(
    operations: list[tuple[str, int]], form: Form, integers: bool, lookahead: int
) -> None:
    traffic = Traffic(FakeVllm(integers=integers, lookahead=lookahead))
    listener = Listener()
    for what, seed in operations:
        traffic.happen(what, seed)
        listener.hear(traffic.vllm.take(), form)
        assert listener.device == traffic.there()


@settings(max_examples=60, deadline=None)
@given(_OPERATIONS, st.integers(1, 30), st.integers(0, 1))
def test_after_losses_nothing_is_told_that_is_not_there(
    operations: list[tuple[str, int]], max_blocks: int, lookahead: int
) -> None:
    traffic, listener = Traffic(FakeVllm(lookahead=lookahead)), Listener(max_blocks=max_blocks)
    for what, seed in operations:
        traffic.happen(what, seed)
        if what == "gap":
            traffic.happen(random.Random(seed).choice(["serve", "evict", "clear"]), seed)
            traffic.vllm.take()  # nobody hears of it
            listener.take(listener.rehasher.forget_told())
        listener.hear(traffic.vllm.take())
        assert listener.device <= traffic.there()
        assert len(listener.device) <= max_blocks
