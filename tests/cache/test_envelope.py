from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import BlockKey, Owner
from cache.envelope import (
    BadValue,
    Corrupt,
    Envelope,
    Foreign,
    header_bytes,
    owner_pattern,
    tenant_of,
)
from cache.sealing import Sealer

TOKENS = 16
PAYLOAD = 1000
IDENTITY = b"i" * 32
KEY = BlockKey(
    link=b"l" * 16,
    parent=b"p" * 16,
    token_bytes=bytes(range(64)),
    start=48,
    owner=Owner(b"tenant__", b"scope___"),
)
PLAIN = Envelope(IDENTITY, TOKENS, PAYLOAD, "float32")
SEALED = Envelope(IDENTITY, TOKENS, PAYLOAD, "float32", Sealer(b"secret"))
BOTH = pytest.mark.parametrize("envelope", [PLAIN, SEALED], ids=["plain", "sealed"])
PATTERN = bytes(index * 7 % 256 for index in range(PAYLOAD))


def wrapped(envelope: Envelope, key: BlockKey = KEY, payload: bytes = PATTERN) -> bytes:
    slot = memoryview(bytearray(envelope.header_bytes) + bytearray(payload))
    return bytes(envelope.wrap(key, slot))


def opened(envelope: Envelope, value: bytes, key: BlockKey = KEY) -> bytes:
    into = memoryview(bytearray(PAYLOAD))
    envelope.open(key, value, into)
    return bytes(into)


def refused(envelope: Envelope, value: bytes, key: BlockKey = KEY) -> type[BadValue]:
    """How a value is refused; nothing of it may reach the buffer."""
    into = memoryview(bytearray(b"\xaa" * PAYLOAD))
    with pytest.raises(BadValue) as caught:
        envelope.open(key, value, into)
    assert bytes(into) == b"\xaa" * PAYLOAD
    return caught.type


@BOTH
def test_round_trip(envelope: Envelope) -> None:
    value = wrapped(envelope)
    assert len(value) == envelope.value_bytes
    assert opened(envelope, value) == PATTERN


@pytest.mark.parametrize("tokens", [1, 16, 32, 48, 256])
def test_header_room_is_aligned_and_holds_the_tokens(tokens: int) -> None:
    assert header_bytes(tokens) % 64 == 0
    envelope = Envelope(IDENTITY, tokens, 64, "float16")
    key = replace(KEY, token_bytes=bytes(4 * tokens))
    slot = memoryview(bytearray(header_bytes(tokens)) + bytearray(b"x" * 64))
    envelope.write_header(key, slot)
    into = memoryview(bytearray(64))
    envelope.open(key, bytes(slot), into)
    assert bytes(into) == b"x" * 64


def test_write_header_leaves_the_payload_alone_and_needs_no_clean_room() -> None:
    slot = memoryview(bytearray(b"\xff" * PLAIN.header_bytes) + bytearray(PATTERN))
    PLAIN.write_header(KEY, slot)
    assert bytes(slot[PLAIN.header_bytes :]) == PATTERN
    assert bytes(slot) == wrapped(PLAIN)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, PLAIN.value_bytes - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_plain_value_shows(position: int, bit: int) -> None:
    value = bytearray(wrapped(PLAIN))
    value[position] ^= 1 << bit
    refused(PLAIN, bytes(value))


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, SEALED.value_bytes - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_sealed_value_shows(position: int, bit: int) -> None:
    value = bytearray(wrapped(SEALED))
    value[position] ^= 1 << bit
    refused(SEALED, bytes(value))


@pytest.mark.parametrize("position", range(PLAIN.header_bytes))
def test_every_header_byte_counts(position: int) -> None:
    for envelope in (PLAIN, SEALED):
        value = bytearray(wrapped(envelope))
        value[position] ^= 0xFF
        refused(envelope, bytes(value))


@BOTH
@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, SEALED.value_bytes - 17))
def test_a_cut_value_is_corrupt(envelope: Envelope, length: int) -> None:
    assert refused(envelope, wrapped(envelope)[:length]) is Corrupt


@BOTH
def test_a_longer_value_is_corrupt(envelope: Envelope) -> None:
    assert refused(envelope, wrapped(envelope) + b"\0") is Corrupt


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, link=b"L" * 16),
        replace(KEY, parent=b"P" * 16),
        replace(KEY, token_bytes=bytes(reversed(range(64)))),
        replace(KEY, start=64),
        replace(KEY, owner=Owner(b"TENANT__", b"scope___")),
        replace(KEY, owner=Owner(b"tenant__", b"SCOPE___")),
    ],
    ids=["link", "parent", "tokens", "start", "tenant", "scope"],
)
def test_a_whole_value_of_another_block_is_foreign(other: BlockKey) -> None:
    assert refused(PLAIN, wrapped(PLAIN, other)) is Foreign
    refused(SEALED, wrapped(SEALED, other))


@pytest.mark.parametrize(
    "other",
    [
        Envelope(b"j" * 32, TOKENS, PAYLOAD, "float32"),
        Envelope(IDENTITY, TOKENS, PAYLOAD, "bfloat16"),
    ],
    ids=["identity", "dtype"],
)
def test_a_whole_value_of_another_model_is_foreign(other: Envelope) -> None:
    assert refused(PLAIN, wrapped(other)) is Foreign


def test_a_whole_value_of_another_block_size_is_foreign() -> None:
    other = Envelope(b"j" * 32, 32, 2 * PAYLOAD, "float32")
    key = replace(KEY, token_bytes=bytes(128))
    slot = memoryview(bytearray(other.slot_bytes))
    assert refused(PLAIN, bytes(other.wrap(key, slot))) is Foreign


def test_sealing_hides_text_and_payload_and_binds_the_key() -> None:
    value = wrapped(SEALED)
    assert KEY.token_bytes not in value
    assert PATTERN[:32] not in value
    assert wrapped(SEALED) != value, "nonces must differ"
    assert refused(Envelope(IDENTITY, TOKENS, PAYLOAD, "float32", Sealer(b"other")), value) is (
        Corrupt
    )


def test_plain_and_sealed_do_not_mix() -> None:
    assert refused(PLAIN, wrapped(SEALED)) is Foreign
    assert refused(SEALED, wrapped(PLAIN)) is Foreign


def test_keys_tell_whose_they_are() -> None:
    name = PLAIN.key_of(KEY)
    assert name.startswith(PLAIN.key_prefix)
    assert tenant_of(name) == KEY.owner.tenant
    assert tenant_of(b"forebay:secret-check") is None
    assert tenant_of(b"other:kv:a:b:c:d") is None
    assert tenant_of(b"forebay:kv:a:zz:c:d") is None
    assert name.split(b":")[-3:] == [
        part.hex().encode() for part in (KEY.owner.tenant, KEY.owner.scope, KEY.link)
    ]
    assert owner_pattern(KEY.owner.tenant, None).endswith(b":*:*")


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="slot: 10 bytes"):
        PLAIN.write_header(KEY, memoryview(bytearray(10)))
    with pytest.raises(ValueError, match="into: 10 bytes"):
        PLAIN.open(KEY, b"", memoryview(bytearray(10)))
    with pytest.raises(ValueError, match="a block of 2 tokens"):
        wrapped(PLAIN, replace(KEY, token_bytes=bytes(8)))
    with pytest.raises(ValueError, match="identity_digest"):
        Envelope(b"short", TOKENS, PAYLOAD, "float32")
    with pytest.raises(ValueError, match="dtype"):
        Envelope(IDENTITY, TOKENS, PAYLOAD, "a" * 17)
