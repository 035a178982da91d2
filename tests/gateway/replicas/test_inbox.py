"""Outputs that wait for their consumer."""

from __future__ import annotations

import asyncio

from engine.request import EngineOutput, FinishReason
from gateway.replicas.inbox import Inbox


def output(token: int, finish_reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput("r", (token,), (), 0, finish_reason)


async def test_what_waits_comes_as_one_and_is_as_old_as_its_last_part() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    first, last = output(1), output(2, FinishReason.STOP)
    inbox.put(first, alive=True)
    inbox.put(last, alive=True)
    await asyncio.sleep(0.01)
    (found,) = [each async for each in inbox]
    assert found.token_ids == (1, 2)
    assert found.made_s == last.made_s >= first.made_s
