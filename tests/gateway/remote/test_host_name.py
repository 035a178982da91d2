"""Names of servers, looked up one beside the other."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest

from gateway.dispatch.member import Condition
from gateway.remote.host_name import HostName
from gateway.remote.replica import open_remote_replica
from gateway.settings_fleet import RemoteSettings
from tests.cache.tls_proxy import make_certificate
from tests.gateway.remote.remote_stage import FAST
from tests.gateway.remote.upstream import Upstream
from tests.gateway.stage import eventually


class NameServer:
    """Answers for `good` at once, for `silent…` once it is told to, and knows no others."""

    def __init__(self) -> None:
        self.answer = Event()
        self.asked: list[str] = []

    def getaddrinfo(self, host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        self.asked.append(host)
        if host.startswith("silent"):
            self.answer.wait(10)
        elif host != "good":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        at = [(address, port) for address in ("127.0.0.1", "::1", "127.0.0.1")]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in at]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr("gateway.remote.host_name.socket.getaddrinfo", server.getaddrinfo)
    yield server
    server.answer.set()


async def test_a_name_is_looked_up_and_an_address_is_not(names: NameServer):
    assert await HostName("good", 1).addresses() == ["127.0.0.1", "::1"]
    assert await HostName("192.0.2.1", 1).addresses() == ["192.0.2.1"]
    assert await HostName("::1", 1).addresses() == ["::1"]
    with pytest.raises(socket.gaierror):
        await HostName("nobody", 1).addresses()
    assert names.asked == ["good", "nobody"]


async def test_a_look_up_that_was_given_up_answers_who_asks_next(names: NameServer):
    name = HostName("silent", 1)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await name.addresses()
    waiting = [asyncio.create_task(name.addresses()) for _ in range(2)]
    await asyncio.sleep(0)
    names.answer.set()
    assert await asyncio.gather(*waiting) == [["127.0.0.1", "::1"]] * 2
    assert names.asked == ["silent"]
    await name.addresses()
    assert names.asked == ["silent"] * 2


async def test_a_moment_without_threads_is_a_look_up_that_failed(
    names: NameServer, monkeypatch: pytest.MonkeyPatch
):
    name = HostName("good", 1)
    with monkeypatch.context() as patched:
        start = Mock(side_effect=RuntimeError("can't start new thread"))
        patched.setattr("gateway.remote.host_name.Thread", lambda **_: Mock(start=start))
        with pytest.raises(OSError, match="no thread left"):
            await name.addresses()
    assert await name.addresses() == ["127.0.0.1", "::1"]
    assert names.asked == ["good"]


async def test_without_open_files_it_is_not_the_name_that_is_wrong(names: NameServer):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    looking = asyncio.create_task(HostName("nobody", 1).addresses())
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        await asyncio.wait([looking])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    failure = looking.exception()
    assert isinstance(failure, OSError)
    assert failure.errno == errno.EMFILE


async def test_the_operator_is_told_why_a_server_cannot_be_reached(
    names: NameServer, tmp_path: Path
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(make_certificate(tmp_path))
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for url, why in (
            (f"http://nobody:{port}", "has a name that cannot be looked up"),
            (f"https://127.0.0.1:{port}", "has a certificate that is not believed (self"),
        ):
            replica = await open_remote_replica(
                "m",
                RemoteSettings(url=url, engine="vllm"),
                {},
                on_change=lambda: None,
                times=FAST,
            )
            try:
                await replica.probed()
                assert replica.health().reason.startswith(why)
            finally:
                await replica.close()


async def test_names_that_nobody_answers_for_leave_other_servers_in_use(names: NameServer):
    upstream = Upstream()
    async with upstream.serve():
        replicas = [
            await open_remote_replica(
                "m",
                RemoteSettings(
                    url=f"http://{host}:{upstream.port}/v1", model="served", engine="vllm"
                ),
                {},
                on_change=lambda: None,
                times=FAST,
            )
            for host in (*(f"silent-{number}" for number in range(40)), "good")
        ]
        try:
            await eventually(lambda: replicas[-1].health().condition is Condition.SERVING)
            assert replicas[0].health().condition is Condition.STARTING
        finally:
            names.answer.set()
            await asyncio.gather(*(replica.close() for replica in replicas))
