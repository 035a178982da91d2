"""Binding the port before anything slow starts, and TLS files that are known to be good.

A process may be handed its sockets instead, by a parent that shares one port among several
(`gateway.shared_port`): bound, inherited, and named by number in HANDED_OVER.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import ExitStack

from gateway.settings import TlsSettings
from gateway.settings_errors import ConfigError

_BACKLOG = 2048
HANDED_OVER = "FOREBAY_LISTEN_FDS"
"""The environment variable with the descriptors of sockets that were handed over: `5,6`."""
WORKERS = "FOREBAY_WORKERS"
"""The one that says how many processes share this one's port, itself included."""


class PortUnavailable(Exception):
    """The address cannot be listened on; the message names host and port on one line."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`, all on one port (0: any free one); or those
    that were handed over, wherever they are bound.

    They listen, not only bind: two sockets may be bound to one port as long as neither listens.
    Raises PortUnavailable.
    """
    # Taken out of the environment: they are this process's, and not for what it starts.
    if numbers := os.environ.pop(HANDED_OVER, ""):
        return _taken_over(numbers)
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except (OSError, UnicodeError):
        raise PortUnavailable(f"server.host: {host} is not an address of this machine") from None
    addresses = list(dict.fromkeys((family, address[0]) for family, _, _, _, address in found))
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for family, address in addresses:
            try:
                listener = _listen_on(family, str(address), port)
            except OSError as error:
                # "localhost" often has an IPv6 address that the machine does not have.
                if sockets and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue
                raise PortUnavailable(why_unavailable(host, port, error)) from None
            opened.callback(listener.close)
            sockets.append(listener)
            port = listener.getsockname()[1]
        opened.pop_all()
        return sockets


def base_url(sockets: Sequence[socket.socket], host: str, *, tls: bool) -> str:
    """Where a client on this machine reaches the gateway."""
    port = sockets[0].getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    if ":" in reachable:
        reachable = f"[{reachable}]"
    return f"{'https' if tls else 'http'}://{reachable}:{port}"


def check_tls(tls: TlsSettings) -> None:
    """Raises ConfigError unless certificate and key can be read and belong together."""
    if tls.cert is None or tls.key is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The password callback keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            [
                f"server.tls: {tls.cert} and {tls.key} are not a PEM certificate and its "
                "unencrypted private key"
            ]
        ) from None
    except OSError as error:
        raise ConfigError([f"server.tls: cannot be read ({error.strerror})"]) from None


def bind(family: int, address: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet. `shared` ones may be several on one port, all of
    one user's; Linux only. Raises OSError."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def why_unavailable(host: str, port: int, error: OSError) -> str:
    """One line for PortUnavailable, with what to do where that is known."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"{host}:{port} is in use; stop what listens there or choose another --port "
            "(server.port in the configuration, FOREBAY_SERVER__PORT in the environment)"
        )
    if error.errno == errno.EACCES:
        return f"{host}:{port} may not be listened on by this user; choose a --port above 1023"
    return f"{host}:{port} cannot be listened on ({error.strerror})"


def _listen_on(family: int, address: str, port: int) -> socket.socket:
    return _listening(bind(family, address, port))


def _listening(bound: socket.socket) -> socket.socket:
    """The socket, which is closed if it cannot listen."""
    try:
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def _taken_over(numbers: str) -> list[socket.socket]:
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for number in numbers.split(","):
            try:
                handed = socket.socket(fileno=int(number))
                handed.set_inheritable(False)
                sockets.append(_listening(handed))
            except (ValueError, OSError):
                raise PortUnavailable(
                    f"{HANDED_OVER}: {number} is no socket that could be listened on"
                ) from None
            opened.callback(handed.close)
        opened.pop_all()
        return sockets
