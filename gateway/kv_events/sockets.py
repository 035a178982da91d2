"""ZeroMQ sockets as scopes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

_MOST_MESSAGE_BYTES = 16 << 20
_MOST_WAITING = 10_000
"""Messages; what comes on top is lost, which shows in the numbers."""
_RECONNECT_MS = 100
_MOST_RECONNECT_MS = 2_000
_HEARTBEAT_MS = 2_000
_DEAD_AFTER_MS = 6_000


@contextmanager
def open_socket(context: zmq.asyncio.Context, kind: int) -> Iterator[zmq.asyncio.Socket]:
    """A socket that notices when its peer is gone, connects again by itself, and does not wait for
    anything when it is closed."""
    socket = context.socket(kind)
    try:
        socket.linger = 0
        socket.maxmsgsize = _MOST_MESSAGE_BYTES
        socket.rcvhwm = _MOST_WAITING
        socket.reconnect_ivl = _RECONNECT_MS
        socket.reconnect_ivl_max = _MOST_RECONNECT_MS
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = _DEAD_AFTER_MS
        yield socket
    finally:
        socket.close()


def connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """Connect a socket, from now on by itself. Raises ZMQError for what is no endpoint.

    ZeroMQ must be told where an address is one of IPv6: it takes it otherwise, and never gets
    there. A name is not: of one with addresses of both kinds it would try those of IPv6 alone,
    where a vLLM listens on IPv4 unless it was told.
    """
    socket.ipv6 = endpoint.startswith("tcp://[")
    socket.connect(endpoint)


def check_endpoint(context: zmq.asyncio.Context, endpoint: str) -> None:
    """Raises ValueError unless this is something to connect to; whether anybody is there does not
    matter."""
    with open_socket(context, zmq.DEALER) as socket:
        try:
            connect(socket, endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"{endpoint}: {error.strerror}") from error


@contextmanager
def watch_connection(socket: zmq.asyncio.Socket) -> Iterator[zmq.asyncio.Socket]:
    """Tells when the socket's connection is made and lost (`is_made`)."""
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    try:
        yield monitor
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)


def is_made(news: list[bytes]) -> bool:
    """Whether what was told is that a connection was made, rather than lost."""
    return parse_monitor_message(news)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
