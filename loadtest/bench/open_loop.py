"""The open loop: requests that are sent when their time has come, however many are unanswered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random

from loadtest.target import Target
from loadtest.wire.connection import Answer, Connection, ExchangeError, connect


def arrival_times_s(draw: Random, count: int, per_s: float) -> list[float]:
    """When independent requests come at a rate, from a first one at 0 on."""
    times, now_s = [], 0.0
    for _ in range(count):
        times.append(now_s)
        now_s += draw.expovariate(per_s)
    return times


async def exchange_at(
    target: Target, requests: Sequence[bytes], at_s: Sequence[float]
) -> list[Answer | str]:
    """Send each request so many seconds from now: its answer, or the line that says why there is
    none. A connection that is free is used again."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    answers: list[Answer | str] = ["not sent"] * len(requests)
    free: list[Connection] = []
    async with AsyncExitStack() as opened, asyncio.TaskGroup() as sent:

        async def send(index: int) -> None:
            connection = (
                free.pop() if free else await opened.enter_async_context(connect(target.endpoint))
            )
            try:
                answers[index] = await connection.exchange(requests[index], target.timeout_s)
            except ExchangeError as error:
                answers[index] = str(error)
            free.append(connection)

        for index, after_s in enumerate(at_s):
            await asyncio.sleep(began_s + after_s - loop.time())
            sent.create_task(send(index))
    return answers
