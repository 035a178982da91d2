"""The client's HTTP: whole and cut answers, kept and closed connections, time-outs."""

from __future__ import annotations

import asyncio
import socket

import pytest

from loadtest.wire import connection as connection_module
from loadtest.wire.backlog import Backlog
from loadtest.wire.connection import (
    Connection,
    Endpoint,
    ExchangeError,
    OutOfSocketsError,
    checked_key,
    connect,
    fetch,
)
from tests.loadtest.fake_server import Call, Reply, fake_server


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", Endpoint("127.0.0.1", 8000, "/v1")),
        ("http://host/v1/", Endpoint("host", 80, "/v1")),
        ("https://host", Endpoint("host", 443, "", tls=True)),
        ("http://[::1]:9/v1", Endpoint("::1", 9, "/v1")),
    ],
)
def test_an_endpoint_is_read_from_its_url(url: str, expected: Endpoint) -> None:
    assert Endpoint.parse(url) == expected


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://[::1]:443/v1"])
def test_an_endpoint_is_said_as_it_was_read(url: str) -> None:
    assert Endpoint.parse(url).url == url


@pytest.mark.parametrize(
    "url", ["http://me:sk-secret@h/v1", "http://sk-secret@h:x/", "http://h/v1?key=sk-secret"]
)
def test_what_would_not_be_sent_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        Endpoint.parse(url)

    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-secret\n", " sk-secret", "sk-secret\r\nx: y", "sk-secrét"])
def test_a_key_that_no_header_holds_is_refused_and_not_repeated(key: str) -> None:
    assert checked_key("sk-secret") == "sk-secret"
    with pytest.raises(ValueError, match="the API key has spaces") as caught:
        Endpoint.parse("http://h/v1", key)

    assert "secr" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://host/", "http://", "http://h:port/", "http://a..b/", "http://h/a b"],
)
def test_a_bad_url_is_one_line_that_names_it(url: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        Endpoint.parse(url)

    assert url in str(caught.value)


def test_a_request_carries_key_and_length_and_never_shows_the_key() -> None:
    endpoint = Endpoint("::1", 9, "/v1", key="sk-secret")
    head, _, body = endpoint.request("POST", "/v1/completions", b"{}").partition(b"\r\n\r\n")

    assert body == b"{}"
    assert head.decode().split("\r\n") == [
        "POST /v1/completions HTTP/1.1",
        "host: [::1]:9",
        "authorization: Bearer sk-secret",
        "content-type: application/json",
        "content-length: 2",
    ]
    assert "sk-secret" not in repr(endpoint)


async def test_a_connection_is_kept_and_every_answer_timed() -> None:
    async def slow(call: Call, reply: Reply) -> None:
        await reply.head(transfer_encoding="chunked", x_custom="yes")
        await reply.chunk(b"one")
        await asyncio.sleep(0.05)
        await reply.chunk(b"two")
        await reply.chunk(b"")

    async with fake_server(slow) as server, connect(server.endpoint) as connection:
        request = server.endpoint.request("GET", "/v1/models")
        answers = [await connection.exchange(request, 5) for _ in range(2)]

    assert server.connections == 1
    for answer in answers:
        assert answer.status == 200
        assert answer.headers["x-custom"] == "yes"
        assert answer.whole
        assert answer.body == b"onetwo"
        first, second = answer.arrivals
        assert second.at_s - first.at_s >= 0.045
        assert answer.sent_at_s < first.at_s < second.at_s <= answer.ended_at_s


async def test_a_server_that_closes_after_each_answer_is_connected_to_again() -> None:
    async def closing(call: Call, reply: Reply) -> None:
        await reply.whole(200, b"ok", connection="close")
        reply.writer.close()

    async with fake_server(closing) as server, connect(server.endpoint) as connection:
        request = server.endpoint.request("GET", "/")
        bodies = [(await connection.exchange(request, 5)).body for _ in range(3)]

    assert bodies == [b"ok"] * 3
    assert server.connections == 3


async def test_an_idle_connection_that_closes_under_a_request_is_replaced_once() -> None:
    async def quietly_closing(call: Call, reply: Reply) -> None:
        if len(server.calls) == 2:
            reply.writer.close()
            return
        await reply.whole(200, b"ok")

    async with fake_server(quietly_closing) as server, connect(server.endpoint) as connection:
        request = server.endpoint.request("GET", "/")
        bodies = [(await connection.exchange(request, 5)).body for _ in range(2)]

    assert bodies == [b"ok", b"ok"]
    assert len(server.calls) == 3


@pytest.mark.parametrize(
    "headers", [{"transfer_encoding": "chunked"}, {"content_length": "100"}], ids=str
)
async def test_a_cut_answer_is_not_whole(headers: dict[str, str]) -> None:
    async def cutting(call: Call, reply: Reply) -> None:
        await reply.head(**headers)
        await reply.chunk(b"half")
        reply.writer.close()

    async with fake_server(cutting) as server:
        answer = await fetch(server.endpoint, "GET", "/")

    assert not answer.whole


async def test_without_a_length_the_end_of_the_connection_is_the_end() -> None:
    async def delimited_by_close(call: Call, reply: Reply) -> None:
        await reply.head(content_type="text/event-stream")
        await reply.raw(b"all of it")
        reply.writer.close()

    async with fake_server(delimited_by_close) as server:
        answer = await fetch(server.endpoint, "GET", "/")

    assert answer.whole
    assert answer.body == b"all of it"


async def test_no_answer_and_no_server_are_lines_that_say_so() -> None:
    async def mute(call: Call, reply: Reply) -> None:
        reply.writer.close()

    async with fake_server(mute) as server:
        with pytest.raises(ExchangeError, match="closed without an answer"):
            await fetch(server.endpoint, "GET", "/")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ExchangeError, match=f"127.0.0.1:{port}: cannot connect"):
            await fetch(Endpoint("127.0.0.1", port, ""), "GET", "/")


async def test_what_is_not_http_is_a_line_that_says_so() -> None:
    async def babbling(call: Call, reply: Reply) -> None:
        await reply.raw(b"SSH-2.0-OpenSSH\r\n")

    async with fake_server(babbling) as server:
        with pytest.raises(ExchangeError, match=r"not HTTP/1\.1"):
            await fetch(server.endpoint, "GET", "/")


async def test_a_silent_server_times_out_and_its_connection_is_not_used_again() -> None:
    async def silent_once(call: Call, reply: Reply) -> None:
        if len(server.calls) == 1:
            await asyncio.sleep(30)
        await reply.whole(200, b"ok")

    async with fake_server(silent_once) as server, connect(server.endpoint) as connection:
        request = server.endpoint.request("GET", "/")
        with pytest.raises(ExchangeError, match=r"within 0\.05 s"):
            await connection.exchange(request, 0.05)
        assert (await connection.exchange(request, 5)).body == b"ok"

    assert server.connections == 2


async def test_a_body_can_be_taken_piece_by_piece_but_not_a_refusal() -> None:
    async def two_answers(call: Call, reply: Reply) -> None:
        await reply.head(200 if call.path == "/well" else 404, transfer_encoding="chunked")
        await reply.chunk(b"one")
        await reply.chunk(b"two")
        await reply.chunk(b"")

    taken: list[tuple[float, bytes]] = []

    def take(at_s: float, data: bytes) -> None:
        taken.append((at_s, data))

    async with fake_server(two_answers) as server:
        connection = Connection(server.endpoint, Backlog())
        try:
            well = await connection.exchange(server.endpoint.request("GET", "/well"), 5, take)
            ill = await connection.exchange(server.endpoint.request("GET", "/ill"), 5, take)
        finally:
            connection.close()

    assert b"".join(data for _, data in taken) == b"onetwo"
    assert all(well.sent_at_s < at_s <= well.ended_at_s for at_s, _ in taken)
    assert (well.status, well.whole, well.body) == (200, True, b"")
    assert (ill.status, ill.whole, ill.body) == (404, True, b"onetwo")
    assert server.connections == 1


@pytest.mark.parametrize("delimited", [True, False])
async def test_a_closed_connection_ends_an_answer_behind_all_that_came(delimited: bool) -> None:
    async def closing(call: Call, reply: Reply) -> None:
        await (reply.head(content_length="100") if delimited else reply.head(x_custom="yes"))
        await reply.raw(b"all of it")
        reply.writer.close()

    async with fake_server(closing) as server:
        connection = Connection(server.endpoint, Backlog())
        try:
            answer = await connection.exchange(server.endpoint.request("GET", "/"), 5)
        finally:
            connection.close()

    assert (answer.body, answer.whole) == (b"all of it", not delimited)


async def test_a_connection_can_be_opened_ahead() -> None:
    async def well(call: Call, reply: Reply) -> None:
        await reply.whole(200, b"ok")

    async with fake_server(well) as server, connect(server.endpoint) as connection:
        await connection.open(5)
        await connection.open(5)
        answer = await connection.exchange(server.endpoint.request("GET", "/"), 5)

    assert answer.body == b"ok"
    assert server.connections == 1


async def test_a_process_without_file_descriptors_is_not_the_servers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def out_of_files(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", out_of_files)
    with pytest.raises(OutOfSocketsError, match="cannot connect"):
        await fetch(Endpoint("127.0.0.1", 9, ""), "GET", "/")


def test_a_request_may_have_more_headers() -> None:
    request = Endpoint("h", 9, "/v1").request("GET", "/", headers={"x-a": "b"})

    assert request == b"GET / HTTP/1.1\r\nhost: h:9\r\nx-a: b\r\n\r\n"


async def test_an_interim_answer_is_not_the_answer() -> None:
    async def early(call: Call, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 100 Continue\r\n\r\n")
        await reply.raw(b"HTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n")
        await reply.whole(200, b"hello")

    async with fake_server(early) as server, connect(server.endpoint) as connection:
        request = server.endpoint.request("GET", "/")
        answers = [await connection.exchange(request, 5.0) for _ in range(2)]

    assert [(answer.status, answer.body) for answer in answers] == [(200, b"hello")] * 2
    assert "link" not in answers[0].headers
    assert server.connections == 1


def test_certificates_are_read_once() -> None:
    assert connection_module._tls_context() is connection_module._tls_context()
