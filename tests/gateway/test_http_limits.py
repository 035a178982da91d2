"""An answer's head goes out with what follows it in the same turn, and never later than that; a
request's has to come in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import cast

import pytest

from gateway.http_limits import _HeadWithBody
from tests.gateway.stage import CHAT, K1, Stage, chat, eventually

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


VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
OFFER = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


def posted(
    body: bytes, headers: str = "", *, chunked: bool = False, version: str = "1.1"
) -> tuple[bytes, bytes]:
    """The head and the body of a chat's request."""
    framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    head = (
        f"POST {CHAT} HTTP/{version}\r\nhost: x\r\nauthorization: Bearer {K1}\r\n"
        f"{headers}{framing}\r\n\r\n"
    )
    return head.encode(), b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body


def chat_body(**fields: object) -> bytes:
    return json.dumps(chat(**fields)).encode()


async def exchange(*conversations: Sequence[bytes], keep_alive_s: float = 30) -> list[bytes]:
    """What comes back in each, whose pieces are sent one by one, until the server closes."""

    async def converse(port: int, pieces: Sequence[bytes]) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        return answer

    async with Stage().served(timeout_keep_alive=keep_alive_s) as port:
        return await asyncio.gather(*(converse(port, pieces) for pieces in conversations))


def statuses(answer: bytes) -> list[int]:
    return [int(each[:3]) for each in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_of_another_protocol_is_passed_over(chunked: bool) -> None:
    head, body = posted(chat_body(), OFFER, chunked=chunked)
    offered = VERSION.replace(b"\r\n\r\n", b"\r\n" + OFFER.encode() + b"\r\n")
    pieces = [head, body[:9], body[9:], offered, head + body, LAST]
    for answer in await exchange(pieces, [b"".join(pieces)]):
        assert statuses(answer) == [200, 200, 200, 200]
        assert answer.count(b'"chat.completion"') == 2


async def test_a_body_behind_an_offer_is_no_request() -> None:
    head, body = posted(VERSION, OFFER)
    for answer in await exchange([head, body, LAST], [head + body + LAST]):
        assert statuses(answer) == [400, 200]
        assert answer.count(b'"version"') == 1


async def test_http_1_0_gets_streams_without_chunks() -> None:
    stream = posted(chat_body(stream=True), "expect: 100-continue\r\n", version="1.0")
    answer, whole = await exchange(stream, posted(chat_body(), version="1.0"))
    head, _, events = answer.partition(b"\r\n\r\n")
    assert statuses(answer) == [200]  # and no 100
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"\n\ndata: [DONE]\n\n")
    assert json.loads(whole.partition(b"\r\n\r\n")[2])["object"] == "chat.completion"


async def test_a_heads_size_does_not_depend_on_its_pieces() -> None:
    def conversations(size: int) -> list[list[bytes]]:
        fields = b"".join(b"a%02d: %b\r\n" % (i, b"b" * (size // 20)) for i in range(20))
        head = LAST[:-2] + fields + b"\r\n"
        path = LAST.replace(b"version", b"x" * size)
        third = size // 3
        return [
            [head[:third], head[third:-100], head[-100:]],
            [path[:third], path[third:]],
        ]

    answers = await exchange(*conversations(60_000), *conversations(70_000))
    assert [statuses(answer) for answer in answers] == [[200], [404], [431], [431]]


async def test_a_body_does_not_count_for_the_head_behind_it() -> None:
    head, body = posted(chat_body(user="x" * 100_000))
    (answer,) = await exchange([head + body[:10], body[10:] + LAST[:30], LAST[30:]])
    assert statuses(answer) == [200, 200]


async def test_what_is_no_http_is_answered_once_all_before_it_is() -> None:
    head, body = posted(chat_body())
    broken = posted(b"", chunked=True)[0] + b"no size\r\n"
    nonsense = b"\0 nonsense\r\n\r\n"
    whole = head + body
    answers = await exchange([whole + VERSION + nonsense], [broken], [whole + broken])
    assert [statuses(answer) for answer in answers] == [[200, 200, 400], [400], [200, 400]]
    assert all(answer.endswith(b'"code":"invalid_http"}}') for answer in answers)


async def test_what_begins_no_request_keeps_no_connection_open() -> None:
    refused = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n" % CHAT.encode()
    answers = await exchange([VERSION, b"\r\n"], [refused, b"rest"], keep_alive_s=0.1)
    assert [statuses(answer) for answer in answers] == [[200], [401]]


async def test_the_keep_alive_time_ends_with_the_next_request() -> None:
    """Also where it began before that request's head was complete."""
    head, body = posted(chat_body())
    stage = Stage()
    stage.replica.step_s = 0.02
    async with stage.served(timeout_keep_alive=0.1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in (VERSION + head[:40], head[40:] + body):
            writer.write(piece)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
    assert statuses(answer) == [200, 200]
    assert b'"finish_reason":"stop"' in answer


async def test_a_client_with_requests_in_line_is_seen_leaving() -> None:
    stage = Stage()
    stage.replica.step_s = 30
    async with stage.served(timeout_keep_alive=30) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"".join(posted(chat_body())))
        await eventually(lambda: stage.replica.open == 1)
        writer.write(VERSION)
        writer.close()
        await eventually(lambda: stage.replica.open == 0)


async def test_trailers_are_no_headers() -> None:
    head, body = posted(chat_body(), chunked=True)
    authorization = f"authorization: Bearer {K1}\r\n".encode()
    nobody = head.replace(authorization, b"") + body[:-2] + authorization + b"\r\n"
    endless = head + body[:-2] + b"".join(b"a%04d: %b\r\n" % (i, b"b" * 999) for i in range(70))
    answers = await exchange([nobody + LAST], [endless])
    assert [statuses(answer) for answer in answers] == [[401], [431]]


@pytest.mark.parametrize(
    "part", [b"0\r\nx: " + b"b" * 70_000, b"1;x=" + b"b" * 70_000], ids=["trailer", "extension"]
)
async def test_what_brings_a_body_no_further_is_bounded(part: bytes) -> None:
    head, body = posted(chat_body(), chunked=True)
    begun = body[: -len(b"0\r\n\r\n")]
    (answer,) = await exchange([head, begun, part[:40_000], part[40_000:65_000], part[65_000:]])
    assert statuses(answer) == [431]


async def test_a_request_that_has_its_answer_gets_no_other() -> None:
    head, _ = posted(b"", chunked=True)
    (answer,) = await exchange([head.replace(K1.encode(), b"nobody"), b"no size\r\n"])
    assert statuses(answer) == [401]
