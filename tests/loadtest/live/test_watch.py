"""The server's own figures over time."""

from __future__ import annotations

import asyncio
import socket

import pytest

from loadtest.live.watch import Watch, watched
from loadtest.record import Sample
from loadtest.wire.connection import Endpoint
from tests.loadtest.fake_server import Call, Reply, fake_server

FOREBAY = """\
# HELP forebay_running Sequences in the batch.
# TYPE forebay_running gauge
forebay_running{replica="r/0",model="m"} 2.0
forebay_running{replica="r/1",model="m"} 3.0
forebay_waiting{replica="r/0",model="m"} 1.0
forebay_admission_waiting{model="m"} 4.0
forebay_prompt_tokens_total{tenant="a",model="m"} 100.0
forebay_cache_bytes{replica="r/0",tier="device"} 10.0
forebay_cache_bytes{replica="r/1",tier="device"} 20.0
forebay_cache_bytes{replica="r/0",tier="dram"} 5.0
forebay_cache_bytes{replica="r/0",tier="redis"} 7.0
forebay_cache_bytes{replica="r/1",tier="redis"} 9.0
forebay_running_elsewhere 77
"""
LATER = (
    FOREBAY.replace(" 100.0", " 160.0")
    + 'forebay_cached_tokens_by_tier_total{tenant="a",model="m",tier="device"} 32.0\n'
    + 'forebay_cached_tokens_by_tier_total{tenant="b",model="m",tier="device"} 16.0\n'
    + 'forebay_cached_tokens_by_tier_total{tenant="a",model="m",tier="redis"} 1.6e+01\n'
)
VLLM = """\
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 6.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 40.0
"""
SGLANG = """\
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:cached_tokens_total{model_name="m",cache_source="device"} 3.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 4.0
"""


async def timeline_of(*pages: str | int) -> tuple[tuple[Sample, ...], int]:
    """What is seen of pages, or of a status instead of one, the last of them again and again; and
    how often it was asked. The run began when the first page came."""
    all_seen = asyncio.Event()

    async def metrics(call: Call, reply: Reply) -> None:
        assert call.path == "/metrics"
        page = pages[min(len(server.calls), len(pages)) - 1]
        if isinstance(page, int):
            await reply.whole(page, b"{}")
        else:
            await reply.whole(200, page.encode(errors="surrogateescape"))
        if len(server.calls) >= len(pages):
            all_seen.set()

    async with fake_server(metrics) as server:
        async with watched(Watch(server.endpoint, every_s=0.001)) as seen:
            await all_seen.wait()
        began_s = seen.seen[0].at_s if seen.seen else 0.0
        return seen.timeline(began_s), len(server.calls)


async def test_forebays_tiers_are_added_up_and_counted_from_the_beginning() -> None:
    (first, *_, last), _ = await timeline_of(FOREBAY, LATER)

    assert first == Sample(
        at_s=0.0,
        running=5.0,
        waiting=5.0,
        prompt_tokens=0.0,
        cached_device_tokens=0.0,
        cached_redis_tokens=0.0,
        device_bytes=30.0,
        dram_bytes=5.0,
        redis_bytes=9.0,
    )
    assert last.at_s > 0.0
    assert (last.prompt_tokens, last.cached_device_tokens) == (60.0, 48.0)
    assert (last.cached_redis_tokens, last.cached_dram_tokens) == (16.0, None)


async def test_other_engines_metrics_are_read_as_well() -> None:
    (_, *_, vllm), _ = await timeline_of(VLLM.replace("40.0", "10.0"), VLLM)
    (_, *_, sglang), _ = await timeline_of("", SGLANG)

    assert (vllm.running, vllm.waiting, vllm.cached_device_tokens) == (5.0, 6.0, 30.0)
    assert vllm.device_bytes is None
    assert (sglang.waiting, sglang.running) == (1.0, None)
    assert (sglang.cached_device_tokens, sglang.cached_dram_tokens) == (3.0, 4.0)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_who_does_not_show_them_is_asked_once(status: int) -> None:
    assert await timeline_of(status) == ((), 1)


async def test_a_page_that_says_nothing_is_no_timeline() -> None:
    timeline, _ = await timeline_of("# nothing\nup 1\n")

    assert timeline == ()


async def test_what_is_no_number_is_passed_over() -> None:
    page = (
        "forebay_running abc\nforebay_waiting NaN\n"
        'forebay_cache_bytes{tier="\udcff"} 3\nforebay_cache_bytes{tier="dram"} 4\n'
    )
    samples, _ = await timeline_of(page)

    assert {(each.running, each.waiting, each.dram_bytes) for each in samples} == {(None, None, 4)}


async def test_one_failed_look_is_passed_over() -> None:
    timeline, asked = await timeline_of(FOREBAY, 500, LATER)

    assert asked >= 3
    assert timeline[-1].prompt_tokens == 60.0


async def test_nobody_there_is_no_timeline() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = Endpoint("127.0.0.1", unused.getsockname()[1], "/v1")
        async with watched(Watch(nobody)) as seen:
            pass
    async with watched(None) as unwatched:
        pass

    assert seen.timeline(0.0) == unwatched.timeline(0.0) == ()
