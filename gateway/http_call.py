"""One HTTP request and its answer, on plain ASGI.

Nothing is read from the connection before the application asks for it: reading is what makes a
server say "100 Continue", so a refusal that needs no body must come first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from time import monotonic
from urllib.parse import parse_qsl

import orjson
from starlette.types import Message, Receive, Scope, Send

from gateway.client_link import LINK, ClientLink
from gateway.errors import ApiError
from gateway.rounds import Rounds

Header = tuple[bytes, bytes]

REQUEST_ID = b"x-request-id"

_SMALL_BODY_BYTES = 64 << 10
_LINGER_S = 2.0
_LINGER_BYTES = 64 << 20


class ClientDisconnectedError(Exception):
    """The client is gone, or has stopped reading; there is nobody left to answer."""


class HttpCall:
    """A request's scope, headers and connection, and the one answer that goes back on it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.request_id: str = scope["state"]["request_id"]
        self.started_s = monotonic()
        self.response_started = False
        self.status: int | None = None  # of the answer, once it has started
        self.response_complete = False
        self.body_complete = False
        self.body_read_s: float | None = None
        self._scope = scope
        self._receive = receive
        self._send = send
        self.link: ClientLink | None = scope.get(LINK)
        self.rounds = Rounds() if self.link is None else self.link.rounds
        self._headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name, value)

    def header(self, name: str) -> str | None:
        """The first header of this (lower-case) name."""
        value = self._headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def query(self) -> dict[str, str]:
        """The query string's parameters, the last of each name; what is not UTF-8 is replaced."""
        raw: bytes = self._scope.get("query_string", b"")
        return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True))

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for "100 Continue" before it sends its body."""
        return (self.header("expect") or "").lower() == "100-continue"

    def peer(self) -> str | None:
        """The address at the other end of the connection."""
        client = self._scope.get("client")
        return client[0] if client else None

    def was_forwarded(self) -> bool:
        """Whether a proxy says that it speaks for somebody else."""
        return any(
            name in self._headers for name in (b"x-forwarded-for", b"forwarded", b"x-real-ip")
        )

    def client_address(self, trusted: Sequence[IPv4Network | IPv6Network]) -> str | None:
        """Who asks: the peer, or what trusted proxies say about the one before them.

        X-Forwarded-For is read from its end, and only as long as each speaker is trusted.
        """
        address = self.peer()
        if not trusted:
            return address
        # several such headers are one list: a proxy may add its own after the client's
        lists = [value for name, value in self._scope["headers"] if name == b"x-forwarded-for"]
        hops = [hop.strip() for hop in b",".join(lists).decode("latin-1").split(",")]
        while address is not None and hops and hops[-1] and _is_within(address, trusted):
            address = hops.pop()
        return address

    async def receive(self) -> Message:
        """The next message from the client; keeps track of whether its body is complete."""
        message = await self._receive()
        if not self.body_complete and not message.get("more_body", False):
            self.body_complete = True  # a client that has gone sends nothing more either
            self.body_read_s = monotonic()
        return message

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Send status and headers, the request's id among them."""
        self.response_started = True
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (REQUEST_ID, self.request_id.encode())],
            }
        )

    async def send(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body; waits while the client is behind with reading."""
        # before it is: servers then say at once that the client is gone
        self.response_complete = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(
        self,
        status: int,
        body: bytes,
        *,
        headers: Iterable[Header] = (),
        content_type: bytes = b"application/json",
    ) -> None:
        """Send a whole answer.

        A client that is still sending a large body would lose the answer if the connection closed
        under it, so the rest of its body is read and dropped for a moment, then the connection is
        closed. A small rest is left to the server, which skips it and keeps the connection.
        """
        all_headers = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            *headers,
        ]
        if not self._large_body_ahead():
            await self.start(status, all_headers)
            await self.send(body, more=False)
            return
        if (b"connection", b"close") not in all_headers:
            all_headers.append((b"connection", b"close"))
        await self.start(status, all_headers)
        await self.send(body, more=True)
        if not self.expects_continue:
            await self._drop_rest_of_body()
        await self.send(b"", more=False)

    async def answer_json(
        self, value: object, *, status: int = 200, headers: Iterable[Header] = ()
    ) -> None:
        """Send a value as JSON."""
        await self.answer(status, orjson.dumps(value), headers=headers)

    async def answer_error(self, error: ApiError, *, headers: Iterable[Header] = ()) -> None:
        """Send a refusal in OpenAI's envelope."""
        own = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await self.answer_json(error.envelope(), status=error.status, headers=[*own, *headers])

    def _large_body_ahead(self) -> bool:
        if self.body_complete:
            return False
        if b"transfer-encoding" in self._headers:
            return True
        length = self._headers.get(b"content-length", b"0")
        if not length.isdigit():
            return True
        return int(length) > (0 if self.expects_continue else _SMALL_BODY_BYTES)

    async def _drop_rest_of_body(self) -> None:
        dropped = 0
        try:
            async with asyncio.timeout(_LINGER_S):
                while not self.body_complete and dropped < _LINGER_BYTES:
                    dropped += len((await self.receive()).get("body", b""))
        except TimeoutError:
            return


def _is_within(address: str, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in networks)
