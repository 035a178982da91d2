"""Reading in slices: in order, everything, and with turns for others in between."""

from __future__ import annotations

import asyncio

from loadtest.wire.backlog import Backlog


async def test_pieces_are_read_in_order_and_not_at_once() -> None:
    read: list[tuple[float, bytes]] = []
    backlog = Backlog()
    for place in range(5):
        backlog.put(lambda at_s, data: read.append((at_s, data)), float(place), b"%d" % place)

    assert (read, len(backlog)) == ([], 5)
    await asyncio.sleep(0)
    assert read == [(float(place), b"%d" % place) for place in range(5)]
    assert len(backlog) == 0


async def test_others_get_their_turn_between_two_slices() -> None:
    seen: list[str] = []
    backlog = Backlog(slice_s=0.0)
    for _ in range(2):
        backlog.put(lambda at_s, data: seen.append("read"), 0.0, b"")
    asyncio.get_running_loop().call_soon(seen.append, "other")
    await asyncio.sleep(0)
    assert (seen, len(backlog)) == (["read", "other"], 1)
    await asyncio.sleep(0)
    assert seen == ["read", "other", "read"]


async def test_what_is_put_while_reading_is_read_too() -> None:
    seen: list[bytes] = []
    backlog = Backlog()

    def again(at_s: float, data: bytes) -> None:
        seen.append(data)
        if data == b"first":
            backlog.put(again, at_s, b"second")

    backlog.put(again, 0.0, b"first")
    await asyncio.sleep(0)
    backlog.put(again, 0.0, b"third")
    await asyncio.sleep(0)

    assert seen == [b"first", b"second", b"third"]
