"""Slots are apart, aligned, and one value each with the header in front."""

import gc
import weakref

import pytest
import torch

from cache.host_arena import HostArena

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    ("block_bytes", "header_bytes"), [(4096, 0), (4096, 112), (1000, 64), (1000, 65), (1, 1)]
)
def test_a_value_is_header_room_and_payload_in_one(block_bytes, header_bytes):
    arena = HostArena(5, block_bytes, header_bytes=header_bytes, pinned=False)
    assert arena.payloads.shape == (5, block_bytes)
    for slot in range(5):
        arena.payloads[slot] = slot + 1
        value = arena.value(slot)
        assert value.contiguous
        assert not value.readonly
        assert len(value) == header_bytes + block_bytes
        value[:header_bytes] = bytes([0xA0 + slot]) * header_bytes
    for slot in range(5):
        assert bytes(arena.payload(slot)) == bytes([slot + 1]) * block_bytes
        head = bytes([0xA0 + slot]) * header_bytes
        assert bytes(arena.value(slot)) == head + bytes([slot + 1]) * block_bytes
        assert arena.payloads[slot].data_ptr() % 64 == 0
    arena.close()


def test_a_payload_is_no_copy():
    arena = HostArena(3, 256, header_bytes=16, pinned=False)
    arena.payload(1)[:4] = b"\x01\x02\x03\x04"
    assert arena.payloads[1, :5].tolist() == [1, 2, 3, 4, 0]
    assert int(arena.payloads.sum()) == 10
    arena.close()


@pytest.mark.parametrize("slot", [-1, 3, 1000])
def test_a_slot_that_is_not_there_is_refused(slot):
    arena = HostArena(3, 256, header_bytes=16, pinned=False)
    with pytest.raises(IndexError, match=f"slot {slot} of 3"):
        arena.value(slot)
    with pytest.raises(IndexError, match=f"slot {slot} of 3"):
        arena.payload(slot)
    arena.close()


@pytest.mark.parametrize(("slots", "block", "header"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_an_impossible_arena_is_refused(slots, block, header):
    with pytest.raises(ValueError, match=f"{slots} slots of {header} \\+ {block} bytes"):
        HostArena(slots, block, header_bytes=header, pinned=False)


def test_a_view_outlives_the_arena_and_nothing_else_does():
    arena = HostArena(4, 1 << 16, header_bytes=32, pinned=False)
    arena.payloads[2] = 9
    view = arena.value(2)
    gone = weakref.ref(arena.payloads)
    arena.close()
    arena.close()
    with pytest.raises(IndexError, match="slot 0 of 0"):
        arena.value(0)
    gc.collect()
    assert gone() is None
    assert bytes(view[32:]) == b"\x09" * (1 << 16)


@needs_cuda
def test_a_pinned_arena_is_known_to_cuda_as_such_until_it_is_closed():
    arena = HostArena(64, 1 << 20, header_bytes=112, pinned=True)
    payloads = arena.payloads
    assert payloads[63].is_pinned()
    arena.close()
    arena.close()
    assert not payloads[63].is_pinned()


@needs_cuda
def test_a_pinned_arena_that_nobody_closed_is_unlocked_with_it():
    arena = HostArena(4, 1 << 20, header_bytes=0, pinned=True)
    payloads = arena.payloads
    del arena
    gc.collect()
    assert not payloads[0].is_pinned()
