"""Clients that leave, stall or half-close, on real connections."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import httpx
import pytest

from gateway.sse import StreamTimes
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import CHAT, K1, Stage, chat, eventually, joined, tenant


def raw_request(**fields: object) -> bytes:
    body = json.dumps(chat("hello", **fields)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {K1}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with an RST, as a killed client's kernel does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


def endless(**fields: object) -> ScriptedReplica:
    return ScriptedReplica(answer=b"x" * 4000, **fields)


async def test_leaving_a_stream_frees_everything_at_once():
    stage = Stage(endless(step_s=0.005), tenants={K1: tenant(concurrency=1)}, max_context=1 << 20)
    async with stage.served() as port:
        for _ in range(10):
            reader, writer = await connect(port)
            writer.write(raw_request(stream=True, max_tokens=4000))
            for _ in range(3):
                await reader.readuntil(b"data: ")
            assert stage.replica.open == 1
            reset(writer)
            await eventually(lambda: stage.replica.open == 0)
        generated = stage.replica.generated
        await asyncio.sleep(0.05)
        assert stage.replica.generated == generated
        stage.replica.answer = b"ok"
        async with httpx.AsyncClient() as client:
            response = await client.post(
                f"http://127.0.0.1:{port}{CHAT}",
                json=chat(),
                headers={"authorization": f"Bearer {K1}"},
            )
        assert response.status_code == 200
    assert len(stage.replica.aborted) == 10
    assert stage.metric("forebay_requests_total", outcome="cancelled") == 10
    assert stage.metric("forebay_requests_total", outcome="success") == 1
    assert stage.metric("forebay_in_flight") == 0
    assert stage.lifecycle.in_flight == 0


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"n": 3}])
async def test_leaving_before_the_first_token_or_a_whole_answer(fields):
    stage = Stage(endless(gate=asyncio.Event()))
    async with stage.served() as port:
        for _ in range(10):
            _, writer = await connect(port)
            writer.write(raw_request(**fields))
            await eventually(lambda: stage.replica.open > 0)
            writer.close()
            await eventually(lambda: stage.replica.open == 0)
    assert stage.metric("forebay_requests_total", outcome="cancelled") == 10
    assert stage.metric("forebay_requests_total") == 10
    assert stage.metric("forebay_in_flight") == 0


async def test_leaving_in_the_middle_of_a_whole_answer():
    stage = Stage(endless(step_s=0.002), max_context=1 << 20)
    async with stage.served() as port:
        async with httpx.AsyncClient(timeout=0.05) as client:
            for _ in range(5):
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(
                        f"http://127.0.0.1:{port}{CHAT}",
                        json=chat(),
                        headers={"authorization": f"Bearer {K1}"},
                    )
        await eventually(lambda: stage.replica.open == 0)
        await eventually(lambda: stage.lifecycle.in_flight == 0)
    assert stage.metric("forebay_requests_total", outcome="cancelled") == 5


async def test_many_normal_calls_on_one_connection_leave_nothing_behind():
    stage = Stage()
    async with stage.served() as port, httpx.AsyncClient() as client:
        for i in range(200):
            response = await client.post(
                f"http://127.0.0.1:{port}{CHAT}",
                json=chat(stream=bool(i % 2)),
                headers={"authorization": f"Bearer {K1}"},
            )
            assert response.status_code == 200
        await asyncio.sleep(0)
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
        assert [name for name in names if "watch" in name or "_attend" in name] == []
    assert stage.metric("forebay_in_flight") == 0
    assert stage.replica.open == 0
    assert stage.metric("forebay_requests_total", outcome="success") == 200


async def test_a_half_closed_client_counts_as_gone():
    stage = Stage(endless(gate=asyncio.Event()))
    async with stage.served() as port:
        _, writer = await connect(port)
        writer.write(raw_request())
        await eventually(lambda: stage.replica.open == 1)
        writer.write_eof()
        await eventually(lambda: stage.replica.open == 0)
        writer.close()


async def test_a_reader_that_never_reads_holds_a_bounded_buffer_and_is_given_up():
    stage = Stage(
        ScriptedReplica(answer=b"x" * 100_000, burst=64, step_s=0.0001),
        times=StreamTimes(heartbeat_s=0.2, stall_s=0.3),
        max_context=1 << 24,
    )
    async with stage.served() as port:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        body = raw_request(stream=True, ignore_eos=True, logprobs=True, top_logprobs=20)
        await asyncio.get_running_loop().sock_sendall(sock, body)
        await eventually(lambda: stage.replica.open == 1)
        await eventually(lambda: stage.replica.open == 0, within_s=5)
        assert stage.replica.generated < 100_000
        sock.close()
    assert stage.metric("forebay_requests_total", outcome="cancelled") == 1


async def test_events_arrive_like_tokens_with_the_headers_ahead():
    stage = Stage(ScriptedReplica(answer=b"abcd", prefill_s=0.1, step_s=0.03))
    clock = asyncio.get_running_loop().time
    async with stage.served() as port, httpx.AsyncClient() as client:
        started = clock()
        async with client.stream(
            "POST",
            f"http://127.0.0.1:{port}{CHAT}",
            json=chat(stream=True),
            headers={"authorization": f"Bearer {K1}", "accept-encoding": "gzip"},
        ) as response:
            headers_s = clock() - started
            arrivals = [clock() - started async for _ in response.aiter_raw()]
    assert headers_s < 0.08
    assert arrivals[0] >= 0.1
    assert arrivals[-1] - arrivals[0] >= 0.1


async def test_an_idle_connection_is_used_again():
    stage = Stage()
    async with stage.served(timeout_keep_alive=75) as port, httpx.AsyncClient() as client:
        for _ in range(3):
            response = await client.post(
                f"http://127.0.0.1:{port}{CHAT}",
                json=chat(stream=True),
                headers={"authorization": f"Bearer {K1}"},
            )
            assert response.status_code == 200
            assert "connection" not in response.headers
            stream = [line for line in response.text.split("\n\n") if line]
            assert joined([json.loads(e[6:]) for e in stream[:-1]]) == "Hello, world"
            await asyncio.sleep(0.01)
