"""Exchanges: what goes out together, how long they may take, and what becomes of unread answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from cache.redis_client import TROUBLE
from gateway.limits.link import LimitsLink
from gateway.named_cache_store import open_control_client
from tests.cache.valkey import Valkey


@pytest.fixture
async def link(valkey: Valkey) -> AsyncIterator[LimitsLink]:
    client = open_control_client(valkey.url, timeout_s=5.0)
    link = LimitsLink(client, timeout_s=0.2)
    yield link
    await link.close()
    await client.aclose()


async def test_answers_come_in_order_and_a_refusal_is_its_own(link: LimitsLink) -> None:
    asked = [link.ask(("INCR", "n")) for _ in range(100)]
    wrong = link.ask(("INCR", "n", "too", "many"))
    answers = await asyncio.gather(*asked)
    assert sorted(answers) == list(range(1, 101))
    with pytest.raises(ResponseError):
        await wrong


async def test_commands_are_carried_out_in_the_order_of_asking(link: LimitsLink) -> None:
    for number in range(100):
        link.ask(("SET", "last", number))
        assert await link.ask(("GET", "last")) == str(number).encode()


async def test_a_stalled_exchange_fails_in_time_and_the_next_one_works(
    link: LimitsLink, valkey: Valkey
) -> None:
    await link.ask(("PING",))
    valkey.freeze()
    began_s = time.monotonic()
    with pytest.raises(TROUBLE):
        await link.ask(("PING",))
    assert 0.2 <= time.monotonic() - began_s < 1.0
    valkey.thaw()
    assert await link.ask(("PING",)) == b"PONG"


async def test_an_answer_that_came_while_the_loop_was_held_up_is_read(link: LimitsLink) -> None:
    await link.ask(("PING",))
    asked = link.ask(("PING",))
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 - that is what is tested
    assert await asked == b"PONG"


async def test_an_answer_that_nobody_waits_for_is_reported(link: LimitsLink) -> None:
    unclaimed = asyncio.Event()
    asked = link.ask(("INCR", "n"), unclaimed.set)
    asked.cancel()
    async with asyncio.timeout(2):
        await unclaimed.wait()
    assert await link.ask(("GET", "n")) == b"1"


async def test_connecting_takes_its_time_and_ends_when_it_is_told_to(
    link: LimitsLink, valkey: Valkey
) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    await link.connect(("PING",), 5.0)
    assert await link.ask(("PING",)) == b"PONG"
    valkey.freeze()
    try:
        with pytest.raises(TimeoutError):
            await link.connect(("PING",), 0.05)
        connecting = asyncio.create_task(link.connect(("PING",), 60.0))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    finally:
        valkey.thaw()
    with pytest.raises(ResponseError):
        await link.connect(("PING", "too", "many"), 5.0)
    assert complaints == []


async def test_nobody_there(tmp_path: Path) -> None:
    client = open_control_client(f"unix://{tmp_path}/none.sock", timeout_s=5.0)
    link = LimitsLink(client, timeout_s=0.2)
    unclaimed = asyncio.Event()
    left = link.ask(("PING",), unclaimed.set)
    left.cancel()
    with pytest.raises(TROUBLE):
        await link.ask(("PING",))
    await unclaimed.wait()
    with pytest.raises(TROUBLE):
        await link.connect(("PING",), 1.0)
    await link.close()
    await client.aclose()
