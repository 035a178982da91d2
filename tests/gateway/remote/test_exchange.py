"""Connections to servers: used again, cut off, and closed under us."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.errors import ApiError
from gateway.remote.exchange import Connections, Patience
from gateway.remote.failures import LossKind, UpstreamLost
from tests.gateway.remote.remote_stage import chat, staged
from tests.gateway.remote.upstream import Received, Upstream, answers, sse, streams, whole
from tests.gateway.stage import chunks, events, eventually, joined

PATIENCE = Patience(1.0, 1.0)


async def test_connections_are_used_again_after_streams_and_whole_answers():
    upstream = Upstream([streams(), answers(200, whole()), answers(400, {}), streams()])
    async with staged(upstream, settings={"engine": "openai", "shared_cache": "accept"}) as stage:
        before = upstream.connections
        for stream in (True, False, False, True):
            await stage.post(chat(stream=stream))
    assert len(upstream.received) == 4
    assert upstream.connections == before + 1


async def test_a_kept_connection_that_is_being_closed_loses_no_request():
    """Two hundred requests, each on a connection that its server closes the moment it is used."""

    async def script(received: Received) -> None:
        if not received.fresh:
            return received.reset() if len(upstream.received) % 2 else received.writer.close()
        return await streams("a b")(received)

    upstream = Upstream([script])
    async with staged(upstream) as stage:
        for _ in range(200):
            answer = await stage.post(chat(stream=True))
            assert joined(chunks(events(answer.text))) == "a b"
            assert len(stage.last.receipts()) == 1
        assert stage.router.members[0].breaker.closed
    retried = {r.headers["x-request-id"] for r in upstream.received if not r.fresh}
    assert len(retried) >= 100
    assert all(
        sum(r.headers["x-request-id"] == name for r in upstream.received) == 2 for name in retried
    )


async def test_an_answer_that_has_begun_is_not_asked_for_twice():
    async def script(received: Received) -> None:
        await received.write(b"HTTP/1.1 200 OK\r\ncontent-le")
        received.reset()

    async with Upstream([script]).serve() as upstream, _connections(upstream) as connections:
        with pytest.raises(UpstreamLost):
            async with connections.exchange("/x", b"{}", {}, PATIENCE):
                pass
    assert len(upstream.received) == 1


async def test_a_body_that_ends_early_is_lost():
    async def script(received: Received) -> None:
        await received.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc")
        received.writer.close()

    async with (
        Upstream([script]).serve() as upstream,
        _connections(upstream) as connections,
        connections.exchange("/x", b"{}", {}, PATIENCE) as exchange,
    ):
        with pytest.raises(UpstreamLost) as lost:
            await exchange.read_all(1000)
    assert lost.value.kind is LossKind.ENDED_EARLY


async def test_an_answer_beyond_the_limit_is_not_read_to_its_end():
    async def script(received: Received) -> None:
        await received.begin_stream()
        while True:
            await received.piece(b"x" * 10_000)

    async with (
        Upstream([script]).serve() as upstream,
        _connections(upstream) as connections,
        connections.exchange("/x", b"{}", {}, PATIENCE) as exchange,
    ):
        with pytest.raises(ApiError) as refusal:
            await exchange.read_all(100_000)
    assert refusal.value.status == 502


async def test_silence_is_timed_from_the_last_byte_and_only_while_somebody_reads():
    async def script(received: Received) -> None:
        await received.begin_stream()
        for i in range(4):
            await asyncio.sleep(0.06)
            await received.piece(sse(str(i)))
        await received.gone()

    async with Upstream([script]).serve() as upstream, _connections(upstream) as connections:
        async with connections.exchange("/x", b"{}", {}, Patience(1.0, 0.1)) as exchange:
            got = b""
            while got != sse("0", "1", "2", "3"):
                got += await exchange.read()
            with pytest.raises(UpstreamLost) as lost:
                await exchange.read()
        assert lost.value.kind is LossKind.STALLED
        assert connections.open_exchanges == 0


async def test_what_came_while_this_process_stood_still_was_no_silence(monkeypatch):
    monkeypatch.setattr("gateway.remote.exchange._STANDSTILL_S", 0.05)

    async def script(received: Received) -> None:
        await received.begin_stream()
        await waiting.wait()
        await received.piece(b"in time")
        time.sleep(0.3)  # noqa: ASYNC251 - everything stands still
        await asyncio.sleep(0.02)
        await received.piece(b", and on")
        await received.gone()

    waiting = asyncio.Event()
    async with (
        Upstream([script]).serve() as upstream,
        _connections(upstream) as connections,
        connections.exchange("/x", b"{}", {}, Patience(1.0, 0.1)) as exchange,
    ):
        read = asyncio.create_task(exchange.read())
        await asyncio.sleep(0)
        waiting.set()
        got = await read
        while got != b"in time, and on":
            got += await exchange.read()
        with pytest.raises(UpstreamLost) as lost:
            await exchange.read()
    assert lost.value.kind is LossKind.STALLED


async def test_whoever_is_silent_can_be_cut_off_before_and_after_the_head():
    async def script(received: Received) -> None:
        if len(upstream.received) > 1:
            await received.begin_stream()
        await received.gone()

    async with Upstream([script]).serve() as upstream, _connections(upstream) as connections:

        async def one() -> UpstreamLost:
            with pytest.raises(UpstreamLost) as lost:
                async with connections.exchange("/x", b"{}", {}, Patience(9, 9)) as exchange:
                    await exchange.read()
            return lost.value

        tasks = [asyncio.create_task(one()) for _ in range(2)]
        await eventually(lambda: len(upstream.received) == 2 and connections.last_heard_s > 0)
        connections.cut_silent(float("inf"), LossKind.DOWN)
        assert [lost.kind for lost in await asyncio.gather(*tasks)] == [LossKind.DOWN] * 2


async def test_a_large_body_goes_out_whole():
    body = b'"' + b"x" * (3 << 20) + b'"'
    async with (
        Upstream([answers(200, {})]).serve() as upstream,
        _connections(upstream) as connections,
        connections.exchange("/x", body, {}, PATIENCE) as exchange,
    ):
        assert await exchange.read_all(100) == b"{}"
    assert upstream.received[0].raw == body


def _connections(upstream: Upstream) -> Connections:
    return Connections(upstream.url, {"content-type": "application/json"}, 4)
