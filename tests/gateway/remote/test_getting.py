"""Short questions to a server."""

from __future__ import annotations

import pytest

from gateway.remote.getting import Getter
from gateway.remote.wire import WireLost
from tests.gateway.remote.upstream import Received, Upstream


class Closing(Upstream):
    """Closes every connection when it is asked for the second time on it."""

    async def _probe(self, received: Received) -> None:
        if not received.fresh:
            received.reset()
        elif received.path == "/half":
            await received.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            received.writer.close()
        else:
            await received.answer(200, b"ok")


async def test_a_kept_connection_that_is_being_closed_loses_no_question():
    async with Closing().serve() as upstream, Getter(upstream.url, {"a": "b"}) as getter:
        for _ in range(3):
            assert (await getter.get("/x?y", 10))[:2] == (200, b"ok")
    assert upstream.connections == 3
    assert len(upstream.probes) == 5
    assert {probe.headers["a"] for probe in upstream.probes} == {"b"}


async def test_an_answer_that_breaks_off_is_not_asked_for_again():
    async with Closing().serve() as upstream, Getter(upstream.url, {}) as getter:
        with pytest.raises(WireLost):
            await getter.get("/half", 10)
        assert (await getter.get("/x", 1)).body is None
    assert upstream.connections == 2
