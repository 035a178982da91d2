"""An answer's head goes out with what follows it in the same turn, and never later than that."""

from __future__ import annotations

import asyncio
from typing import cast

from gateway.http_limits import _HeadWithBody

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
