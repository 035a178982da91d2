"""Clients that leave: the engine must hear of it, whatever it is doing for them."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.e2e.client import ACME_KEY, CHAT, Client, chat, reset, sent
from tests.e2e.gateway_process import GatewayProcess, eventually

ENDLESS = chat("x", "tiny", max_tokens=4000, ignore_eos=True, temperature=1)
RESETS = 50


@contextmanager
def streaming(gateway: GatewayProcess, events: int) -> Iterator[socket.socket]:
    """An endless stream of which so many events have been read."""
    with sent(gateway.port, ACME_KEY, CHAT, ENDLESS | {"stream": True}) as connection:
        received = b""
        while received.count(b"data: ") < events:
            piece = connection.recv(4096)
            assert piece
            received += piece
        yield connection


def cancelled(gateway: GatewayProcess) -> float:
    return gateway.metrics().total("forebay_requests_total", outcome="cancelled")


def test_fifty_resets_in_the_middle_of_streams(gateway: GatewayProcess, acme: Client) -> None:
    before = cancelled(gateway)
    for _ in range(RESETS):
        with streaming(gateway, 3) as connection:
            reset(connection)
    gateway.until_idle(2.0)
    assert cancelled(gateway) - before == RESETS
    steps = gateway.metrics().total("forebay_steps_total")
    time.sleep(0.2)
    assert gateway.metrics().total("forebay_steps_total") == steps
    started = time.monotonic()
    acme.whole(CHAT, chat("ping", "tiny", max_tokens=1))
    assert time.monotonic() - started < 2


def test_leaving_before_the_first_token(gateway: GatewayProcess) -> None:
    before = cancelled(gateway)
    prefill = chat("river " * 900, max_tokens=4, cache_salt="cold")
    for stream in (True, False):
        with sent(gateway.port, ACME_KEY, CHAT, prefill | {"stream": stream}) as connection:
            eventually(lambda: gateway.metrics().total("forebay_running", model="m") == 1, 5)
            reset(connection)
        gateway.until_idle(2.0)
    assert cancelled(gateway) - before == 2


def test_leaving_the_queue(gateway: GatewayProcess) -> None:
    """Four sequences fill the batch; the fifth and sixth wait, and leave waiting."""
    before = cancelled(gateway)
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(streaming(gateway, 1))
        waiting = [
            held.enter_context(sent(gateway.port, ACME_KEY, CHAT, ENDLESS | {"stream": stream}))
            for stream in (True, False)
        ]
        eventually(lambda: gateway.metrics().total("forebay_waiting", model="tiny") == 2, 5)
        for connection in waiting:
            reset(connection)
        eventually(lambda: gateway.metrics().total("forebay_waiting", model="tiny") == 0, 2)
        assert gateway.metrics().total("forebay_running", model="tiny") == 4
    gateway.until_idle(2.0)
    assert cancelled(gateway) - before == 6


def test_whole_answers_that_nobody_waits_for(gateway: GatewayProcess, acme: Client) -> None:
    """A client that times out and retries, then a long normal life without a leak."""
    before = cancelled(gateway)
    for _ in range(10):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(gateway.url + CHAT, json=ENDLESS, headers=acme.headers, timeout=0.1)
    gateway.until_idle(2.0)
    assert cancelled(gateway) - before == 10
    short = chat("ping", "tiny", max_tokens=1)
    for _ in range(50):
        acme.whole(CHAT, short)
    files, memory = gateway.open_files(), gateway.rss_bytes()
    for _ in range(300):
        acme.whole(CHAT, short)
    assert gateway.open_files() <= files
    assert gateway.rss_bytes() - memory < 8 << 20
    gateway.until_idle()


def test_events_come_like_tokens_also_to_who_accepts_gzip(
    gateway: GatewayProcess, acme: Client
) -> None:
    body = chat("Tell me a story about a river.", max_tokens=24, ignore_eos=True, stream=True)
    headers = acme.headers | {"Accept-Encoding": "gzip"}
    started = time.monotonic()
    with acme.http.stream("POST", CHAT, json=body, headers=headers) as answer:
        head_s = time.monotonic() - started
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert not {"content-encoding", "content-length"} & set(answer.headers)
        arrivals = [
            time.monotonic() - started
            for line in answer.iter_lines()
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"]
        ]
    assert head_s <= arrivals[0]
    # one at a time, over most of the answer's life: a held-back stream comes in one lump
    assert len(set(arrivals)) >= 12
    assert arrivals[-1] - arrivals[0] > 0.5 * arrivals[-1]
    gaps = [late - early for early, late in itertools.pairwise(arrivals)]
    assert max(gaps) < 0.5 * (arrivals[-1] - arrivals[0])
