"""Connections to a server: how many, how long, and to which of its addresses."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.remote import pool as pools
from gateway.remote.exchange import Connections, Patience
from gateway.remote.failures import LossKind, UpstreamLost
from gateway.remote.pool import Origin, Pool
from tests.cache.tls_proxy import make_certificate
from tests.gateway.remote.upstream import Received, Upstream, answers
from tests.gateway.stage import eventually

PATIENCE = Patience(2.0, 2.0)


@asynccontextmanager
async def pooled(upstream: Upstream, limit: int = 4) -> AsyncIterator[Pool]:
    async with upstream.serve():
        pool = Pool(Origin.of(upstream.url), limit)
        try:
            yield pool
        finally:
            await pool.close()


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://box/v1", ("box", 80, False, "box", "/v1")),
        ("https://box:443/v1", ("box", 443, True, "box", "/v1")),
        ("https://box:8443", ("box", 8443, True, "box:8443", "")),
        ("http://[::1]:81/a b", ("::1", 81, False, "[::1]:81", "/a%20b")),
        ("http://bücher.example/é%20", ("xn--bcher-kva.example", 80, False, None, "/%C3%A9%20")),
    ],
)
def test_an_origin_is_what_a_url_says(url: str, origin: tuple[object, ...]):
    found = Origin.of(url)
    assert found == Origin(*(found.authority if part is None else part for part in origin))


async def test_no_more_than_the_limit_are_taken_at_once():
    async with pooled(Upstream(), limit=2) as pool:
        taken = [await pool.take() for _ in range(2)]
        assert await pool.spare() is None
        third = asyncio.create_task(pool.take())
        await asyncio.sleep(0)
        assert not third.done()
        pool.give_back(taken[0])
        assert await third is taken[0]
        for wire in taken:
            pool.give_back(wire)


async def test_a_connection_is_kept_for_a_while_and_closed_after_it(
    monkeypatch: pytest.MonkeyPatch,
):
    upstream = Upstream()
    async with pooled(upstream) as pool:
        first = await pool.take()
        pool.give_back(first)
        assert await pool.spare() is first
        pool.give_back(first)
        pool.drop_old()
        assert pool.has_idle
        monkeypatch.setattr(pools, "_IDLE_S", 0.0)
        pool.drop_old()
        assert not pool.has_idle
        second = await pool.take()
        assert second is not first
        pool.give_back(second)
        assert await pool.spare() is None
        await eventually(lambda: not second.is_open)


async def test_a_connection_that_its_server_has_closed_is_not_taken():
    upstream = Upstream()
    async with upstream.serve():
        pool = Pool(Origin.of(upstream.url), 4)
        wire = await pool.take()
        pool.give_back(wire)
    await eventually(lambda: not wire.is_open)
    assert not pool.has_idle
    with pytest.raises(UpstreamLost) as lost:
        await pool.take()
    assert lost.value.kind is LossKind.REFUSED
    await pool.close()


async def test_the_next_address_is_tried_and_the_one_that_answered_remembered(
    monkeypatch: pytest.MonkeyPatch,
):
    async with pooled(Upstream()) as pool:
        tried: list[str] = []
        dial = pool._dial

        async def resolved() -> list[str]:
            return ["127.0.0.9", "127.0.0.8", "127.0.0.1"]

        async def dialled(address: str) -> object:
            tried.append(address)
            if address == "127.0.0.8":
                await asyncio.Event().wait()
            return await dial(address)

        monkeypatch.setattr(pool._host_name, "addresses", resolved)
        monkeypatch.setattr(pool, "_dial", dialled)
        monkeypatch.setattr(pools, "_NEXT_ADDRESS_S", 0.02)
        for _ in range(2):
            pool.give_back(await pool.take(fresh=True))
        assert tried == ["127.0.0.9", "127.0.0.8", "127.0.0.1", "127.0.0.1"]


async def test_a_server_is_believed_by_its_certificate_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        async with Connections(url, {}, 4) as distrustful:
            with pytest.raises(UpstreamLost) as lost:
                await distrustful.exchange("/x", b"{}", {}, PATIENCE).open()
        assert lost.value.kind is LossKind.REFUSED
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with (
            Connections(url, {}, 4) as connections,
            connections.exchange("/x", b"{}", {}, PATIENCE) as exchange,
        ):
            assert await exchange.read_all(10) == b"ok"


async def test_a_server_is_believed_again_once_its_authority_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0, ssl=context)
    async with server:
        pool = Pool(Origin.of(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"), 4)
        try:
            pool.give_back(await pool.take())
            make_certificate(tmp_path)  # the same file, for gateway and server
            context.load_cert_chain(certificate)
            with pytest.raises(UpstreamLost):
                await pool.take(fresh=True)
            pool.give_back(await pool.take(fresh=True))
        finally:
            await pool.close()


async def test_waiting_for_a_connection_ends_with_the_patience_and_gives_the_place_back():
    async def silent(received: Received) -> None:
        await received.gone()

    upstream = Upstream([silent])
    async with upstream.serve(), Connections(upstream.url, {}, 1) as connections:
        held = [
            asyncio.create_task(connections.exchange("/x", b"{}", {}, Patience(9, 9)).open())
            for _ in range(2)
        ]
        await eventually(lambda: len(upstream.received) == 2)
        with pytest.raises(UpstreamLost) as lost:
            await connections.exchange("/x", b"{}", {}, Patience(0.05, 9)).open()
        assert lost.value.kind is LossKind.STALLED
        assert connections.open_exchanges == 2
        connections.cut_silent(float("inf"), LossKind.DOWN)
        ended = await asyncio.gather(*held, return_exceptions=True)
        assert all(isinstance(error, UpstreamLost) for error in ended)
        upstream.scripts = [answers(200, {})]
        async with connections.exchange("/x", b"{}", {}, PATIENCE) as exchange:
            assert await exchange.read_all(10) == b"{}"


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\rb", "a\0b"])
async def test_a_header_cannot_bring_another_one_along(value: str):
    connections = Connections("http://127.0.0.1:1", {}, 1)
    async with connections:
        with pytest.raises(ValueError, match="more than one line"):
            connections.exchange("/x", b"", {"x-request-id": value}, PATIENCE)
    with pytest.raises(ValueError, match="more than one line"):
        Connections("http://127.0.0.1:1", {"authorization": value}, 1)
