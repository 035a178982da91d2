"""Bodies of every size and encoding, and connections that idle."""

from __future__ import annotations

import gzip
import http.client
import json
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import httpx
import pytest

from tests.e2e.client import CHAT, Client, chat
from tests.e2e.conftest import KEEP_ALIVE_S
from tests.e2e.gateway_process import GatewayProcess

BODY_LIMIT = 16 << 20
SHORT = chat("ping", "tiny", max_tokens=1)
MIB = 1 << 20


def padded(size: int) -> bytes:
    """A valid body of this many bytes, most of it in a field that costs no tokens."""
    bare = json.dumps(SHORT | {"metadata": {"padding": ""}})
    return json.dumps(SHORT | {"metadata": {"padding": "x" * (size - len(bare))}}).encode()


def post(acme: Client, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return acme.http.post(
        CHAT, content=content, headers=acme.headers | {"Content-Type": "application/json"} | named
    )


@pytest.mark.parametrize("size", [300 << 10, 8 * MIB, BODY_LIMIT])
def test_agent_sized_bodies_are_taken(acme: Client, size: int) -> None:
    assert post(acme, padded(size)).status_code == 200


def test_over_the_limit_is_413_declared_or_not(gateway: GatewayProcess, acme: Client) -> None:
    too_large = padded(BODY_LIMIT + 1)
    memory = gateway.rss_bytes()
    for content in (too_large, iter([too_large[:MIB], too_large[MIB:]])):
        answer = post(acme, content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
    assert gateway.rss_bytes() - memory < 3 * BODY_LIMIT
    assert acme.post(CHAT, SHORT).status_code == 200


def test_compressed_bodies(acme: Client) -> None:
    body = padded(MIB)
    assert post(acme, gzip.compress(body), Content_Encoding="gzip").status_code == 200
    assert post(acme, zlib.compress(body), Content_Encoding="deflate").status_code == 200
    for encoding in ("zstd", "br", "foo"):
        assert post(acme, body, Content_Encoding=encoding).status_code == 415
    broken = post(acme, body, Content_Encoding="gzip")
    assert broken.status_code == 400
    assert "Content-Encoding" in broken.json()["error"]["message"]


def test_a_gzip_bomb_leaves_the_memory_flat(gateway: GatewayProcess, acme: Client) -> None:
    post(acme, padded(BODY_LIMIT))  # what the limit itself costs, the allocator has by now
    one_stream = gzip.compress(bytes(64 * MIB), compresslevel=1)
    members = gzip.compress(bytes(4 * MIB)) * 256  # one GiB once inflated
    memory = gateway.rss_bytes()
    for bomb in (one_stream, members, members):
        answer = post(acme, bomb, Content_Encoding="gzip")
        assert answer.status_code == 413
    assert gateway.rss_bytes() - memory < 2 * BODY_LIMIT
    assert acme.post(CHAT, SHORT).status_code == 200


def test_refusals_come_without_the_body(gateway: GatewayProcess, acme: Client) -> None:
    cases = [("Bearer sk-nobody-knows-this-one", "1000", 401), (None, str(BODY_LIMIT + 1), 413)]
    for authorization, length, status in cases:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
        connection.putrequest("POST", CHAT)
        connection.putheader("Authorization", authorization or acme.headers["Authorization"])
        connection.putheader("Content-Length", length)
        connection.putheader("Expect", "100-continue")
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == status
        assert json.load(answer)["error"]["message"]
        connection.close()


def get_again(port: int, idle_s: float) -> tuple[float, int | None]:
    """Ask, idle, ask again: at most how long the connection idled, and the second status; None if
    it was closed by then."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.auto_open = False
    try:
        connection.connect()
        started = time.monotonic()
        connection.request("GET", "/version")
        assert connection.getresponse().read()
        time.sleep(idle_s)
        connection.request("GET", "/version")
        idled_s = time.monotonic() - started
        answer = connection.getresponse()
        answer.read()
        return idled_s, answer.status
    except (http.client.RemoteDisconnected, ConnectionError):
        return time.monotonic() - started, None
    finally:
        connection.close()


def test_idle_connections_live_as_long_as_documented(gateway: GatewayProcess) -> None:
    """Within the timeout none is ever reset; after it all are closed."""
    within = [KEEP_ALIVE_S * 0.95 * i / 300 for i in range(300)]
    after = [KEEP_ALIVE_S + 0.5] * 20
    with ThreadPoolExecutor(320) as threads:
        answers = list(threads.map(get_again, repeat(gateway.port), within + after))
    in_time = [status for idled_s, status in answers[:300] if idled_s < KEEP_ALIVE_S - 0.1]
    assert len(in_time) > 200
    assert set(in_time) == {200}
    assert {status for _, status in answers[300:]} == {None}
