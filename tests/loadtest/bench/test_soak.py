"""The soak: who is cut off, what is looked at when the server is idle, and what it complains of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.bench import soak as soak_module
from loadtest.bench.campaign import CampaignError
from loadtest.bench.soak import Checkpoint, SoakReport, complaints, samples, soak
from loadtest.forebay_server import RunningServer
from loadtest.vocabulary import Vocabulary
from tests.loadtest.fake_server import (
    Call,
    FakeServer,
    Reply,
    answer_well,
    fake_server,
    token_event,
    usage_event,
)

GOOD = Checkpoint(
    prompts=100,
    blocks={
        "device": {"free": 3, "cached": 5, "held": 0},
        "dram": {"free": 1, "cached": 9, "held": 0},
    },
    used_bytes={"device": 500, "dram": 900, "redis": 10**9},
    rss_bytes=300_000_000,
    redis_rss_bytes=50_000_000,
    probe_hit_rate=1.0,
    probe_ttft_ms=5.0,
)
BUDGETS = {"device": 800, "dram": 1000}
BOOKS = {"free": 3, "cached": 4, "held": 1}


def judged(change: Callable[[int], Checkpoint], failures: tuple[str, ...] = ()) -> list[str]:
    """What is said of nine checkpoints."""
    return complaints(SoakReport({}, failures, tuple(change(n) for n in range(9))), BUDGETS)


def test_a_steady_server_is_not_complained_of() -> None:
    assert judged(lambda _: GOOD) == []
    assert judged(lambda _: replace(GOOD, rss_bytes=None, redis_rss_bytes=None)) == []
    # filling the tiers at first is no drift, nor is a lone slow probe
    assert judged(lambda n: replace(GOOD, rss_bytes=100_000_000) if n < 3 else GOOD) == []
    assert judged(lambda n: replace(GOOD, probe_ttft_ms=90.0) if n == 8 else GOOD) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n: {"blocks": {"device": BOOKS}}, "1 device blocks are held, and nothing runs"),
        (lambda n: {"used_bytes": {"dram": 1001}}, "dram holds 1,001 of 1,000 bytes"),
        (lambda n: {"redis_rss_bytes": 200 << 20}, "the embedded Redis takes 209,715,200 bytes"),
        (lambda n: {"probe_hit_rate": 1.0 if n < 6 else 0.9}, "probe hit rate: 100.0% before, 90"),
        (lambda n: {"probe_hit_rate": 0.5}, "probe hit rate: 50.0% before, 50.0% at last"),
        (lambda n: {"probe_ttft_ms": 5.0 + 6 * n}, "TTFT of probes: 29.0 ms before, 47.0"),
        (lambda n: {"rss_bytes": 300_000_000 + n * 10_000_000}, "RSS: 340 MB before, 370 MB"),
        (
            lambda n: {"blocks": {"device": {"free": 8 - n // 8, "cached": 0, "held": 0}}},
            "the number of blocks changed: {'device': 8} at first, {'device': 7} at last",
        ),
    ],
)
def test_what_piles_up_or_is_lost_is_named(
    change: Callable[[int], Mapping[str, object]], said: str
) -> None:
    lines = judged(lambda n: replace(GOOD, **change(n)))

    assert any(said in line for line in lines), lines


def test_failed_requests_and_too_short_a_run_are_named() -> None:
    assert judged(lambda _: GOOD, ("a", "b")) == ["2 requests failed: a"]
    short = complaints(SoakReport({}, (), (GOOD, GOOD)), BUDGETS)
    assert short == ["too few stretches to tell whether anything drifts"]


def test_samples_are_read_off_a_metrics_page() -> None:
    page = '# HELP a b\na{tier="x",state="y"} 2.0\na{tier="z",state="y"} 1e+03\nab{} 3\na 4\n'

    assert samples(page, "a") == [
        ({"tier": "x", "state": "y"}, 2.0),
        ({"tier": "z", "state": "y"}, 1000.0),
        ({}, 4.0),
    ]


def page(held: int) -> bytes:
    return (
        f'forebay_cache_blocks{{replica="r",state="held",tier="device"}} {held}.0\n'
        f'forebay_cache_blocks{{replica="r",state="free",tier="device"}} {8 - held}.0\n'
        'forebay_cache_bytes{replica="r",tier="device"} 0.0\n'
    ).encode()


async def run(
    behave: Callable[[Call, Reply], object], monkeypatch: pytest.MonkeyPatch
) -> tuple[SoakReport, FakeServer]:
    monkeypatch.setattr(soak_module, "_PROBES", 1)
    monkeypatch.setattr(soak_module, "_STRETCHES", 3)
    monkeypatch.setattr(soak_module, "_IDLE_S", 0.2)
    async with fake_server(behave) as server:
        running = RunningServer(server.endpoint, os.getpid(), 0.0, Path())
        report = await soak(
            running, prompts=120, seed=1, vocabulary=Vocabulary(3, 250), tell=lambda _: None
        )
    return report, server


async def answer(call: Call, reply: Reply, cached: int) -> None:
    await reply.head(content_type="text/event-stream", transfer_encoding="chunked")
    await reply.event(token_event("x", "length"))
    await reply.event(usage_event(len(call.body["prompt"]), call.body["max_tokens"], cached))
    await reply.event(b"[DONE]")
    await reply.chunk(b"")


async def test_all_prompts_are_sent_and_probes_are_asked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[tuple[int, ...]] = set()

    async def behave(call: Call, reply: Reply) -> None:
        if call.path == "/metrics":
            await reply.whole(200, page(0))
            return
        prompt = tuple(call.body["prompt"])
        await answer(call, reply, 96 if prompt in seen else 0)
        seen.add(prompt)

    # this process's children are other tests' servers
    monkeypatch.setattr("loadtest.bench.soak.descendants_rss_bytes", lambda _: 0)
    report, server = await run(behave, monkeypatch)

    assert sum(report.ends.values()) == 120
    assert report.ends["cut"] > 0
    assert report.failures == ()
    assert [one.prompts for one in report.checkpoints] == [40, 80, 120]
    assert all(one.probe_hit_rate == 1.0 for one in report.checkpoints)
    assert all(one.blocks == {"device": {"held": 0, "free": 8}} for one in report.checkpoints)
    posts = [call for call in server.calls if call.method == "POST"]
    assert any("prompt_cache_retention" in call.body for call in posts)
    assert all(3 <= token < 250 for call in posts for token in call.body["prompt"])
    assert complaints(report, {"device": 1}) == []


async def test_blocks_that_stay_held_are_waited_for_and_then_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def behave(call: Call, reply: Reply) -> None:
        if call.path == "/metrics":
            await reply.whole(200, page(2))
        else:
            await answer(call, reply, 96)

    report, _ = await run(behave, monkeypatch)

    assert "2 device blocks are held" in complaints(report, {"device": 1})[0]


async def test_a_refused_prompt_is_a_failure_and_a_refused_probe_ends_the_soak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def behave(call: Call, reply: Reply) -> None:
        if call.path == "/metrics":
            await reply.whole(200, page(0))
        elif len(call.body["prompt"]) == 97:
            await answer_well(call, reply)
        else:
            await reply.whole(503, b'{"error": {"message": "full"}}')

    report, _ = await run(behave, monkeypatch)
    assert report.ends["failed"] == len(report.failures) > 60
    assert report.failures[0] == "status 503: full"

    async def refuse(call: Call, reply: Reply) -> None:
        await reply.whole(503, b'{"error": {"message": "full"}}')

    with pytest.raises(CampaignError, match="a probe failed: status 503: full"):
        await run(refuse, monkeypatch)
