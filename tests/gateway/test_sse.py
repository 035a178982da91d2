"""How values become events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.http_call import HttpCall
from gateway.rounds import Rounds
from gateway.sse import EventStream, StreamTimes, event


@pytest.mark.parametrize("character", [*"\r\n\v\f\x1c\x1d\x1e", "\x85", "\u2028", "\u2029"])
def test_no_client_sees_a_line_end_inside_an_event(character: str) -> None:
    value = {"content": f"東京{character}🦊"}
    sent = event(value).decode()
    assert sent.splitlines() == [sent.removesuffix("\n\n"), ""]
    assert json.loads(sent.removeprefix("data: ")) == value


class OneRound(Rounds):
    """Goes round when the test says so."""

    attend: Callable[[], None]

    def join(self, attend: Callable[[], None], every_s: float) -> None:
        self.attend = attend

    def leave(self, attend: Callable[[], None]) -> None:
        """Nobody is there at the end."""


async def test_no_comment_follows_the_end() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("there is no body")

    scope = {"method": "POST", "path": "/", "headers": [], "state": {"request_id": "r"}}
    call = HttpCall(scope, receive, send)
    rounds = call.rounds = OneRound()
    async with EventStream(call, (), StreamTimes(heartbeat_s=0.0)) as events:
        rounds.attend()  # begins to speak as soon as somebody waits
        await events.end(b"data: 1\n\n")
        rounds.attend()
        for _ in range(3):
            await asyncio.sleep(0)
    assert [message.get("more_body") for message in sent[1:]] == [False]
    assert call.response_complete
