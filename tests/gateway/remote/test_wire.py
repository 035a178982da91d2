"""Answers as bytes: cut anywhere, too large, broken off, or more than was asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.remote.failures import LossKind
from gateway.remote.wire import Wire, WireLost

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nX-A: 1\r\nx-a: 2\r\n\r\n"
    b"3\r\nabc\r\n5;note=x\r\ndefgh\r\n0\r\nx-trailer: y\r\n\r\n"
)
COUNTED = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class FakeTransport(asyncio.Transport):
    """Notes what is done to it; closing takes effect when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.unsent = 0
        self.closing = False
        self.paused = False

    def write(self, data: Any) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def opened() -> tuple[Wire, FakeTransport, list[Wire]]:
    lost: list[Wire] = []
    wire, transport = Wire(lost.append), FakeTransport()
    wire.connection_made(transport)
    return wire, transport, lost


def asked() -> tuple[Wire, FakeTransport]:
    wire, transport, _ = opened()
    wire.ask(b"POST / HTTP/1.1\r\n\r\n", b"{}")
    return wire, transport


async def body_of(wire: Wire) -> bytes:
    await wire.head()
    whole = b""
    while piece := await wire.read():
        whole += piece
    return whole


async def lost_by(wire: Wire) -> WireLost:
    with pytest.raises(WireLost) as lost:
        await body_of(wire)
    return lost.value


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, len(CHUNKED) - 1), max_size=8))
def test_an_answer_is_the_same_wherever_it_is_cut(cuts: list[int]):
    async def run() -> None:
        wire, transport = asked()
        reading = asyncio.create_task(body_of(wire))
        at = 0
        for cut in [*sorted(set(cuts)), len(CHUNKED)]:
            wire.data_received(CHUNKED[at:cut])
            await asyncio.sleep(0)
            at = cut
        assert await reading == b"abcdefgh"
        assert (wire.status, wire.headers[b"x-a"]) == (200, b"1")
        assert wire.may_be_used
        wire.rest()
        wire.ask(b"", b"")
        wire.data_received(COUNTED)
        assert await body_of(wire) == b"ok"
        assert b"x-trailer" not in wire.headers
        assert b"x-a" not in wire.headers
        assert not transport.closing

    asyncio.run(run())


@pytest.mark.parametrize(
    "begin",
    [
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 8200 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 129 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (65 << 10),
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: " + b"y" * (65 << 10),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"y" * (65 << 10),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"nonsense\r\n",
    ],
    ids=[
        "a large field",
        "many fields",
        "a field without end",
        "hints without end",
        "trailers without end",
        "a chunk's notes without end",
        "no size",
        "another protocol",
        "two lengths",
        "another version",
        "nonsense",
    ],
)
async def test_what_is_too_large_or_no_answer_is_given_up(begin: bytes):
    wire, transport = asked()
    for start in range(0, len(begin), 4096):
        if not transport.closing:
            wire.data_received(begin[start : start + 4096])
    lost = await lost_by(wire)
    assert lost.kind is LossKind.GARBAGE
    assert not lost.unanswered
    assert transport.closing
    assert not wire.may_be_used


@pytest.mark.parametrize(
    ("sent", "error", "kind"),
    [
        (b"", None, LossKind.RESET),
        (b"", ConnectionResetError(), LossKind.RESET),
        (b"HTTP/1.1 200 OK\r\ncontent-", None, LossKind.RESET),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", None, LossKind.ENDED_EARLY),
        (CHUNKED[:-20], None, LossKind.ENDED_EARLY),
        (CHUNKED[:-20], ConnectionResetError(), LossKind.RESET),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", ConnectionResetError(), LossKind.RESET),
    ],
)
async def test_a_connection_that_ends_too_early_loses_the_answer(
    sent: bytes, error: Exception | None, kind: LossKind
):
    wire, _ = asked()
    if sent:
        wire.data_received(sent)
    wire.connection_lost(error)
    lost = await lost_by(wire)
    assert (lost.kind, lost.unanswered) == (kind, not sent)


async def test_an_answer_without_a_length_ends_with_its_connection():
    wire, _, lost = opened()
    wire.ask(b"", b"")
    wire.data_received(b"HTTP/1.1 200 OK\r\n\r\nabc")
    wire.connection_lost(None)
    assert await body_of(wire) == b"abc"
    assert lost == [wire]
    assert not wire.may_be_used


@pytest.mark.parametrize("more", [COUNTED, b"HTTP/1.1 2", b"x"])
async def test_an_answer_that_nobody_asked_for_is_nobodys(more: bytes):
    """Whoever is next on the connection must not get it."""
    wire, transport = asked()
    wire.data_received(COUNTED + more)
    assert await body_of(wire) == b"ok"
    assert not wire.may_be_used
    assert transport.closing
    wire, transport = asked()
    wire.data_received(COUNTED)
    assert await body_of(wire) == b"ok"
    wire.rest()
    wire.data_received(more)
    assert not wire.may_be_used
    assert transport.closing


async def test_a_connection_is_used_again_only_where_that_is_certain():
    wire, transport = asked()
    assert not wire.may_be_used
    wire.data_received(COUNTED)
    assert wire.may_be_used
    transport.unsent = 1
    assert not wire.may_be_used  # of a request that was answered before all of it had gone
    transport.unsent = 0
    wire.rest()
    wire.ask(b"", b"")
    wire.data_received(COUNTED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    assert await body_of(wire) == b"ok"
    assert not wire.may_be_used


async def test_a_connection_is_not_used_again_while_somebody_waits_for_its_last_answer():
    wire, _ = asked()
    reading = asyncio.create_task(body_of(wire))
    await asyncio.sleep(0)
    wire.data_received(COUNTED)
    assert not wire.may_be_used
    assert await reading == b"ok"
    assert wire.may_be_used


async def test_a_server_is_not_read_from_faster_than_its_client_reads():
    wire, transport = asked()
    wire.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    await wire.head()
    wire.data_received(b"x" * 300_000)
    assert transport.paused
    assert len(await wire.read()) == 300_000
    reading = asyncio.create_task(wire.read())
    await asyncio.sleep(0)
    assert not transport.paused
    wire.data_received(b"y" * 700_000)
    assert len(await reading) == 700_000
    assert not transport.paused  # all is there: nothing to hold back
    assert await wire.read() == b""


async def test_what_comes_behind_an_answer_does_not_keep_its_reader_waiting():
    wire, transport = asked()
    reading = asyncio.create_task(body_of(wire))
    await asyncio.sleep(0)
    wire.data_received(COUNTED + b"junk")
    async with asyncio.timeout(1):
        assert await reading == b"ok"
    assert transport.closing


async def test_an_answer_without_a_length_that_is_cut_off_here_is_not_whole():
    wire, _, _ = opened()
    wire.ask(b"", b"")
    wire.data_received(b"HTTP/1.1 200 OK\r\n\r\nabc")
    wire.abort()
    wire.connection_lost(None)
    assert (await lost_by(wire)).kind is LossKind.ENDED_EARLY


async def test_bytes_are_dated_when_they_come_and_not_when_they_are_read():
    wire, _ = asked()
    wire.data_received(COUNTED)
    heard_s = wire.heard_s
    await asyncio.sleep(0.01)
    assert await body_of(wire) == b"ok"
    assert wire.heard_s == heard_s
