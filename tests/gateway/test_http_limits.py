"""An answer's head goes out with what follows it in the same turn, and never later than that; a
request's has to come in time."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from gateway.http_limits import _HeadWithBody
from tests.gateway.stage import Stage

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Written:
    """A transport that notes its writes, and how many there had been when it was closed."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed_after: int | None = None

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed_after = len(self.writes)

    def is_closing(self) -> bool:
        return self.closed_after is not None


def over(transport: Written) -> _HeadWithBody:
    return _HeadWithBody(cast(asyncio.Transport, transport), asyncio.get_running_loop())


async def test_head_and_body_of_one_turn_are_one_write() -> None:
    below = Written()
    transport = over(below)
    transport.write(HEAD)
    transport.write(b"one")
    transport.write(b"two")
    assert below.writes == [HEAD + b"one", b"two"]
    await asyncio.sleep(0)
    assert below.writes == [HEAD + b"one", b"two"]


async def test_a_head_alone_goes_out_with_the_turn() -> None:
    below = Written()
    transport = over(below)
    transport.write(HEAD)
    assert below.writes == []
    await asyncio.sleep(0)
    assert below.writes == [HEAD]
    transport.write(b"later")
    assert below.writes == [HEAD, b"later"]


async def test_interim_answers_keep_their_order() -> None:
    below = Written()
    transport = over(below)
    transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    transport.write(HEAD)
    transport.write(b"body")
    assert b"".join(below.writes) == b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"body"


async def test_closing_sends_what_is_held() -> None:
    below = Written()
    transport = over(below)
    transport.write(HEAD)
    transport.close()
    assert below.writes == [HEAD]
    assert below.closed_after == 1
    assert transport.is_closing()


@pytest.mark.parametrize("pieces", [1, 2], ids=["in one piece", "in two"])
async def test_a_head_that_follows_another_request_has_its_own_time(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http_limits.HEAD_TIMEOUT_S", 0.05)
    request = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    async with Stage().served(timeout_keep_alive=30) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = request + b"GET /health/live HTTP/1.1\r\nhost: "
        half = len(request) // 2
        for piece in [sent] if pieces == 1 else [sent[:half], sent[half:]]:
            writer.write(piece)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            answer = await reader.read()  # to the end, which the server makes
        assert answer.count(b"HTTP/1.1 200 OK") == 1
        writer.close()
