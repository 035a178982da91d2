"""Bodies: sizes, encodings, and refusals that come before the body does."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib

import httpx
import pytest

from tests.gateway.stage import CHAT, K1, Stage, chat, error_of

LIMIT = 64 << 10


def small_limit() -> Stage:
    return Stage(server={"body_limit": LIMIT}, max_context=1 << 24)


async def post(stage: Stage, content: object, **headers: str) -> httpx.Response:
    async with stage.client() as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.post(CHAT, content=content, headers=named)


BODY = json.dumps(chat("hello")).encode()


@pytest.mark.parametrize("size", [300 << 10, 8 << 20])
async def test_agent_size_bodies_are_taken(size):
    stage = Stage(max_context=1 << 24)
    response = await stage.post(CHAT, chat("x" * size, max_tokens=1))
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] > size


async def test_over_the_limit_by_content_length_nothing_is_read():
    stage = small_limit()
    reads = 0

    async def body():
        nonlocal reads
        for _ in range(10):
            reads += 1
            yield b"x" * LIMIT

    response = await post(stage, body(), content_length=str(10 * LIMIT))
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert str(LIMIT) in error_of(response)["message"]


async def test_over_the_limit_by_chunks_it_stops_there():
    async def body():
        for _ in range(10):
            yield b" " * (LIMIT // 4)

    response = await post(small_limit(), body())
    assert response.status_code == 413
    error_of(response)


@pytest.mark.parametrize(
    ("encoding", "encoded"),
    [
        ("gzip", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
        ("gzip", gzip.compress(BODY[:20]) + gzip.compress(BODY[20:])),
    ],
)
async def test_encodings_are_decoded(encoding, encoded):
    response = await post(small_limit(), encoded, content_encoding=encoding)
    assert response.status_code == 200

    async def trickle():
        for i in range(len(encoded)):
            yield encoded[i : i + 1]

    response = await post(small_limit(), trickle(), content_encoding=encoding)
    assert response.status_code == 200


@pytest.mark.parametrize("encoding", ["zstd", "br", "foo", "gzip, gzip", "compress"])
async def test_other_encodings_are_415(encoding):
    response = await post(small_limit(), BODY, content_encoding=encoding)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_encoding"
    assert response.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    "encoded",
    [
        BODY,
        gzip.compress(BODY)[:-3],
        gzip.compress(BODY)[:5],
        gzip.compress(BODY) + b"rubbish",
        b"\x1f\x8b",
    ],
)
async def test_a_broken_encoding_is_400(encoded):
    response = await post(small_limit(), encoded, content_encoding="gzip")
    assert response.status_code == 400
    assert "Content-Encoding" in error_of(response)["message"]


async def test_a_gzip_bomb_costs_no_more_than_the_limit():
    bomb = gzip.compress(b"\0" * (64 << 20))
    stage = Stage(server={"body_limit": 1 << 20})
    stage.app  # noqa: B018 - built before memory is measured
    tracemalloc.start()
    response = await post(stage, bomb, content_encoding="gzip")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.status_code == 413
    assert peak < 8 << 20


async def talk(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send parts on a fresh connection; everything that comes back until it closes or is quiet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        answer = b""
        while True:
            try:
                piece = await asyncio.wait_for(reader.read(65536), 0.3)
            except TimeoutError:
                return answer
            if not piece:
                return answer
            answer += piece
    finally:
        writer.close()


def request_head(*, key: str = K1, path: str = CHAT, **headers: object) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_refusals_do_not_ask_for_the_body():
    stage = small_limit()
    async with stage.served() as port:
        expecting = {"expect": "100-continue", "content_length": len(BODY)}
        for head, status in [
            (request_head(key="wrong", **expecting), b"401"),
            (request_head(path="/nothing", **expecting), b"404"),
            (request_head(expect="100-continue", content_length=10 * LIMIT), b"413"),
            (request_head(content_encoding="foo", **expecting), b"415"),
        ]:
            answer = await talk(port, head)
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert b"100 Continue" not in answer
            assert b"connection: close" in answer
        answer = await talk(port, request_head(**expecting), BODY, pause_s=0.05)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


async def test_a_client_that_is_still_sending_gets_its_413():
    stage = small_limit()
    async with stage.served() as port, httpx.AsyncClient(timeout=10) as client:
        for body in (b"x" * (8 << 20), _pieces(8 << 20)):
            response = await client.post(
                f"http://127.0.0.1:{port}{CHAT}",
                content=body,
                headers={"authorization": f"Bearer {K1}"},
            )
            assert response.status_code == 413
            error_of(response)
        # a small body that was not read costs no connection
        first = await client.post(f"http://127.0.0.1:{port}{CHAT}", content=BODY)
        assert first.status_code == 401
        assert "connection" not in first.headers


async def _pieces(size: int):
    for _ in range(size // 65536):
        yield b"x" * 65536


async def test_a_client_that_stops_sending_is_told_so(monkeypatch):
    monkeypatch.setattr("gateway.http_body._IDLE_S", 0.05)
    stage = small_limit()
    async with stage.served() as port:
        answer = await talk(port, request_head(content_length=100) + b"{")
        assert answer.startswith(b"HTTP/1.1 408")
    assert stage.metric("forebay_requests_total", outcome="refused") == 1


async def test_a_client_that_leaves_before_its_body_is_cancelled():
    stage = small_limit()
    async with stage.served() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_head(content_length=100) + b"{")
        await writer.drain()
        writer.transport.abort()
        await asyncio.sleep(0.05)
        assert stage.metric("forebay_requests_total", outcome="cancelled") == 1
