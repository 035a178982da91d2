"""One port for several processes, and sockets that are handed over."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from gateway.listening import HANDED_OVER, PortUnavailable, listen
from gateway.shared_port import SharedPort

CLIENTS = 64


def accepted(listener: socket.socket) -> int:
    """How many connections wait at a listening socket; takes them off it."""
    listener.setblocking(False)
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


@contextmanager
def connected(port: int) -> Iterator[Sequence[socket.socket]]:
    with ExitStack() as opened:
        yield [
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            for _ in range(CLIENTS)
        ]


def test_connections_are_dealt_out_and_go_to_those_that_are_left() -> None:
    with SharedPort.reserved("127.0.0.1", 0) as port, port.sockets() as [one]:
        one.listen()
        with port.sockets() as [other]:
            other.listen()
            with connected(port.port):
                shares = [accepted(one), accepted(other)]
        assert sum(shares) == CLIENTS
        assert min(shares) > 0
        with connected(port.port):
            assert accepted(one) == CLIENTS


def test_a_reserved_port_is_nobody_elses_and_refuses_while_nobody_listens() -> None:
    with SharedPort.reserved("127.0.0.1", 0) as port:
        with pytest.raises(PortUnavailable, match=rf"127\.0\.0\.1:{port.port} is in use"):
            listen("127.0.0.1", port.port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.port), timeout=5)
    for listener in listen("127.0.0.1", port.port):
        listener.close()


def test_a_port_that_others_share_already_is_found_taken() -> None:
    with SharedPort.reserved("127.0.0.1", 0) as port, port.sockets() as [theirs]:
        theirs.listen()
        with (
            pytest.raises(PortUnavailable, match="is in use"),
            SharedPort.reserved("127.0.0.1", port.port),
        ):
            raise AssertionError("two groups on one port")


def test_every_address_of_a_name_is_shared() -> None:
    alone = listen("localhost", 0)
    addresses = {listener.getsockname()[0] for listener in alone}
    for listener in alone:
        listener.close()
    with SharedPort.reserved("localhost", 0) as port, port.sockets() as sockets:
        assert {each.getsockname()[0] for each in sockets} == addresses
        assert {each.getsockname()[1] for each in sockets} == {port.port}


def test_sockets_that_are_handed_over_are_listened_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedPort.reserved("127.0.0.1", 0) as port, port.sockets() as [mine]:
        handed = os.dup(mine.fileno())
        os.set_inheritable(handed, True)
        monkeypatch.setenv(HANDED_OVER, str(handed))
        [listener] = listen("192.0.2.1", 1)
        with listener, connected(port.port):
            assert listener.getsockname() == ("127.0.0.1", port.port)
            assert not listener.get_inheritable()
            assert accepted(listener) == CLIENTS
        assert HANDED_OVER not in os.environ


@pytest.mark.parametrize("numbers", ["x", "-1", "1048575"])
def test_what_is_no_socket_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, numbers: str
) -> None:
    monkeypatch.setenv(HANDED_OVER, numbers)
    with pytest.raises(PortUnavailable, match=f"{HANDED_OVER}: {numbers} is no socket"):
        listen("127.0.0.1", 0)
