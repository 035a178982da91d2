"""The proxy part: rounds in pairs, and answers that must be the stub's."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loadtest.bench import routing_proxy
from loadtest.bench.campaign import CampaignError
from loadtest.bench.routing_proxy import (
    CASES,
    ONE_EVENT,
    SIXTEEN_EVENTS,
    ProxyPlan,
    complaint,
    measure_proxy,
    proxy_config,
    running_stub,
)
from loadtest.forebay_server import RunningServer
from loadtest.wire.connection import Answer, Arrival, Endpoint
from tests.loadtest.fake_server import Call, Reply, fake_server

SHORT = ProxyPlan(rounds=2, alone_requests=3, crowd_requests=8, crowd=4, warm_up=4)
GOOD = b'data: {"choices":[{"delta":{"content":"token "}}]}\n\ndata: [DONE]\n\n'


def answer(body: bytes, status: int = 200, whole: bool = True) -> Answer:
    return Answer(status, {}, [Arrival(0.0, body)], 0.0, 0.0, whole)


@pytest.mark.parametrize(
    ("one", "case", "why"),
    [
        (answer(GOOD), ONE_EVENT, None),
        ("no connection", ONE_EVENT, "no connection"),
        (answer(b'{"error":{"message":"full"}}', 503), ONE_EVENT, "status 503: full"),
        (answer(GOOD, whole=False), ONE_EVENT, "an answer is not whole"),
        (answer(GOOD), SIXTEEN_EVENTS, "an answer is not whole"),
        (answer(GOOD[:-14]), ONE_EVENT, "a stream has no end"),
    ],
)
def test_an_answer_that_is_not_the_stubs_is_told(
    one: Answer | str, case: routing_proxy.ProxyCase, why: str | None
) -> None:
    assert complaint(one, case) == why


def test_the_configuration_names_every_upstream() -> None:
    config = proxy_config([Endpoint("127.0.0.1", 1, "/v1"), Endpoint("127.0.0.1", 2, "/v1")])
    assert "http://127.0.0.1:1/v1" in config
    assert "http://127.0.0.1:2/v1" in config


async def test_every_case_is_measured_direct_and_proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, tuple[str, ...]]] = []

    @asynccontextmanager
    async def other_stub(
        *, config: str, flags: tuple[str, ...] = ()
    ) -> AsyncIterator[RunningServer]:
        started.append((config, flags))
        async with running_stub() as stub:
            yield RunningServer(stub, os.getpid(), 0.0, Path())

    async def at_once(_: Endpoint) -> None:
        return

    monkeypatch.setattr(routing_proxy, "running_forebay", other_stub)
    monkeypatch.setattr(routing_proxy, "_until_all_are_ready", at_once)
    figures = await measure_proxy(lambda _: None, SHORT)

    wanted = [(case.name, concurrency) for case in CASES for concurrency in (1, 4)]
    assert [(one.case, one.concurrency) for one in figures[:6]] == wanted
    assert [one.proxied_ms.count for one in figures[:2]] == [6, 16]
    assert all(one.proxied_ms.count == one.direct_ms.count for one in figures)
    assert all(one.proxied_per_s > 0 for one in figures)
    assert "engine: openai, shared_cache: accept" in started[0][0]
    assert [flags for _, flags in started] == [(), ("--workers", "2")][: len(started)]


async def test_a_gateway_that_refuses_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: Call, reply: Reply) -> None:
        await reply.whole(503, b'{"error":{"message":"no room"}}')

    @asynccontextmanager
    async def full(*, config: str) -> AsyncIterator[RunningServer]:
        async with fake_server(refuse) as server:
            yield RunningServer(server.endpoint, os.getpid(), 0.0, Path())

    monkeypatch.setattr(routing_proxy, "running_forebay", full)
    with pytest.raises(CampaignError, match="forebay: status 503: no room"):
        await measure_proxy(lambda _: None, SHORT)
