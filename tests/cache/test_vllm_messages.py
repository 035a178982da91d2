"""A vLLM's messages are read in every form, and nothing that comes instead does harm."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.prompt_links import token_bytes_of
from cache.vllm_events import VllmRehasher
from cache.vllm_messages import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    NotABatch,
    VllmBatch,
    decode_batch,
)
from tests.cache.fake_vllm import CLEARED, FORMS, Form, message, removed, stored

EVENTS = [
    stored([7, b"h" * 32], None, range(32), salt="s"),
    removed([-7, b"h" * 32], medium="CPU", locality="REMOTE"),
    CLEARED,
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(form: Form) -> None:
    old = form == "oldest"
    assert decode_batch(message(EVENTS, form)) == VllmBatch(
        (
            BlocksStored(
                hashes=[7, b"h" * 32],
                parent=None,
                token_bytes=token_bytes_of(range(32)),
                block_tokens=16,
                medium=None if old else "GPU",
                adapted=False,
                extra_keys=None if old else [["s"], None],
                group=None if old else 0,
                attention=None if old else "full_attention",
                remote=False,
            ),
            BlocksRemoved(
                [-7, b"h" * 32],
                medium=None if old else "CPU",
                group=None if old else 0,
                remote=not old,
            ),
            AllCleared(),
        )
    )


@pytest.mark.parametrize("form", FORMS[2:])
def test_kinds_that_are_not_known_are_counted_apart_from_what_is_broken(form: Form) -> None:
    strange = [
        {"type": "BlockInactive", "block_hashes": "?"},
        {"type": "BlockStored"},
        removed([1.5]),  # type: ignore[list-item]  # not a hash
        stored([1], None, [-1]),
        stored([1], None, [1 << 32]),
        stored([1], None, ["1"]),  # type: ignore[list-item]  # not a token
        {"kind": "BlockStored"},
        CLEARED,
    ]
    assert decode_batch(message(strange, form)) == VllmBatch((AllCleared(),), 1, 6)


def test_kinds_in_arrays_too() -> None:
    rows: list[Any] = [["BlockInactive", 1], ["BlockStored", 1], [], [1], "x", None, 5]
    payload = msgspec.msgpack.encode([0, rows])
    assert decode_batch(payload) == VllmBatch((), unknown=1, malformed=6)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x93\x01",
        b"\x91" * 100_000,
        b"\x92\x01" + b"\x91" * 100_000,
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, {}]),
        msgspec.msgpack.encode({"ts": 1.0}),
        message(EVENTS)[:-3],
        message(EVENTS) + b"\x00",
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(NotABatch):
        decode_batch(payload)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damage_never_raises_anything_else(form: Form, damage: list[tuple[int, int]]) -> None:
    payload = bytearray(message(EVENTS, form))
    for at, byte in damage:
        payload[at % len(payload)] = byte
    rehasher = VllmRehasher(lambda _: b"r" * 16)
    try:
        batch = decode_batch(bytes(payload))
    except NotABatch:
        return
    for _ in rehasher.follow(batch.events):
        rehasher.check_integrity()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(EVENTS[0].keys() - {"type"})), _JSON, _JSON)
def test_any_field_may_be_anything(name: str, value: Any, other: Any) -> None:
    rehasher = VllmRehasher(lambda _: b"r" * 16)
    events = [EVENTS[0] | {name: value}, removed([7], group_idx=other, medium=value)]
    batch = decode_batch(message(events))
    assert len(batch.events) + batch.malformed == 2
    for _ in rehasher.follow(batch.events):
        rehasher.check_integrity()
