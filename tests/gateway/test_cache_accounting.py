"""Cached tokens by tier: in the answer's usage, its receipt, the log and the metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from structlog.testing import capture_logs

from cache.block import Tier
from cache.report import CacheUse
from engine.request import EngineOutput, EngineRequest
from engine.sampling_params import SamplingParams
from gateway.choice import Choice
from gateway.recent_requests import RecentRequests
from gateway.request import Request
from gateway.text_choice import TextChoice
from gateway.wire.usage import sum_by_tier
from tests.gateway.fakes import ByteTokenizer, ScriptedReplica
from tests.gateway.stage import COMPLETIONS, Stage, chunks, events, eventually, prompt

TEXT = (
    "a prompt of several blocks, so that some of them can come from one tier and some from others"
)
FULL = len(TEXT) // 16
"""Blocks that a repeated prompt can take from the cache; its last token is in none of them."""


def by_place(index: int) -> Tier:
    """Two blocks from the device, one from DRAM, the rest from Redis."""
    return Tier.DEVICE if index < 2 else Tier.DRAM if index < 3 else Tier.REDIS


DEVICE, DRAM, REDIS = 32, 16, 16 * (FULL - 3)
CACHED = DEVICE + DRAM + REDIS


def tiered(**fields: object) -> Stage:
    return Stage(ScriptedReplica(tier_of=by_place, **fields))


def counted(stage: Stage) -> dict[str, float]:
    """Cached tokens of each tier by the metrics, after checking that they add up."""
    tiers = {
        tier.value: stage.metric("forebay_cached_tokens_by_tier_total", tier=tier) for tier in Tier
    }
    assert sum(tiers.values()) == stage.metric("forebay_cached_tokens_total")
    assert min(tiers.values()) >= 0
    return tiers


async def warm(stage: Stage) -> None:
    response = await stage.post(COMPLETIONS, prompt(TEXT, max_tokens=1))
    assert response.headers["x-forebay-cached-tiers"] == "device=0,dram=0,redis=0"


async def test_a_whole_answer_says_how_many_tokens_came_from_where():
    stage = tiered()
    await warm(stage)
    with capture_logs() as lines:
        response = await stage.post(COMPLETIONS, prompt(TEXT, max_tokens=1))
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": CACHED}
    assert response.headers["x-forebay-cached-tokens"] == str(CACHED)
    expected = f"device={DEVICE},dram={DRAM},redis={REDIS}"
    assert response.headers["x-forebay-cached-tiers"] == expected
    assert counted(stage) == {"device": DEVICE, "dram": DRAM, "redis": REDIS}
    (line,) = [line for line in lines if line["event"] == "request"]
    logged = [line[f"cached_{name}tokens"] for name in ("", "device_", "dram_", "redis_")]
    assert logged == [CACHED, DEVICE, DRAM, REDIS]


async def test_a_stream_counts_the_same_once():
    stage = tiered()
    await warm(stage)
    body = prompt(TEXT, stream_options={"include_usage": True})
    *_, last = chunks(await stage.stream(COMPLETIONS, body))
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED}
    assert counted(stage) == {"device": DEVICE, "dram": DRAM, "redis": REDIS}


async def test_a_stream_says_by_tier_what_was_cached_where_that_is_asked_and_may_be_seen():
    stage = tiered()
    await warm(stage)
    body = prompt(TEXT, stream_options={"include_usage": True}, stream=True)
    async with stage.client() as client:
        asked = await client.post(
            COMPLETIONS, json=body, headers={"x-forebay-cached-tiers": "include"}
        )
        wrong = await client.post(COMPLETIONS, json=body, headers={"x-forebay-cached-tiers": "yes"})
    *_, last, _ = events(asked.text)
    assert last["usage"]["prompt_tokens_details"] == {
        "cached_tokens": CACHED,
        "cached_tokens_by_tier": {"device": DEVICE, "dram": DRAM, "redis": REDIS},
    }
    assert wrong.status_code == 400
    assert "x-forebay-cached-tiers" in wrong.json()["error"]["message"]


async def test_a_prompt_counts_once_as_its_least_lucky_choice_had_it():
    stage = tiered()
    body = prompt([TEXT, TEXT.upper()], n=3, max_tokens=1)
    # the first choice of each computes what the other two find
    response = await stage.post(COMPLETIONS, body)
    assert response.headers["x-forebay-cached-tiers"] == "device=0,dram=0,redis=0"
    assert sum(counted(stage).values()) == 0
    assert stage.replica.hits == 2 * 2 * FULL
    response = await stage.post(COMPLETIONS, body)
    assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 * CACHED}
    assert counted(stage) == {"device": 2 * DEVICE, "dram": 2 * DRAM, "redis": 2 * REDIS}


async def test_a_request_that_never_ran_counts_nothing():
    stage = tiered(full=True)
    response = await stage.post(COMPLETIONS, prompt(TEXT))
    assert response.status_code == 503
    assert counted(stage) == {"device": 0, "dram": 0, "redis": 0}


@pytest.mark.parametrize("trouble", [{"dies_after": 2}, {"fails_after": 2}])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_breaks_off_counts_what_it_was_given(trouble, stream):
    stage = tiered()
    await warm(stage)
    for name, after in trouble.items():
        setattr(stage.replica, name, after)
    await stage.post(COMPLETIONS, prompt(TEXT, stream=stream))
    assert counted(stage) == {"device": DEVICE, "dram": DRAM, "redis": REDIS}


@pytest.mark.parametrize("ran", [False, True])
async def test_a_client_that_leaves_is_counted_once(ran):
    stage = tiered()
    await warm(stage)
    stage.replica.gate = asyncio.Event()
    stage.replica.step_s = 0.005
    if ran:
        stage.replica.gate.set()
    generated = stage.replica.generated
    async with stage.served() as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            body = prompt(TEXT, stream=True, max_tokens=200)
            headers = {"authorization": "Bearer key-one-0123456789"}
            async with client.stream("POST", COMPLETIONS, json=body, headers=headers):
                if ran:
                    await eventually(lambda: stage.replica.generated > generated + 3)
        await eventually(lambda: stage.metric("forebay_requests_total", outcome="cancelled") == 1)
    expected = {"device": DEVICE, "dram": DRAM, "redis": REDIS}
    assert counted(stage) == (expected if ran else dict.fromkeys(expected, 0))


@pytest.mark.parametrize("trouble", [{}, {"full": True}, {"fails_after": 2}])
async def test_every_request_is_noted_once_however_it_ends(trouble, monkeypatch):
    noted: list[Request] = []
    monkeypatch.setattr(RecentRequests, "note", lambda self, request: noted.append(request))
    stage = tiered()
    await warm(stage)
    for name, value in trouble.items():
        setattr(stage.replica, name, value)
    await stage.post(COMPLETIONS, prompt([TEXT, "other"]))
    (_, request) = noted
    expected = {} if "full" in trouble else {0: CACHED, 1: 0}
    uses = {prompt: use.cached_tokens for prompt, use in request.cache_uses().items() if use}
    assert uses.items() <= expected.items()
    if not trouble:
        assert uses == expected
        assert request.cache_uses()[0].runs[0].tier is Tier.DEVICE


def output(use: CacheUse | None, cached: int, *tokens: int) -> EngineOutput:
    return EngineOutput("r", tokens, (), cached, None, cache_use=use)


async def test_only_the_first_word_on_the_cache_counts():
    """A preempted sequence finds its own blocks again; that is no second hit."""
    request = EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=9), None)
    text = TextChoice(ByteTokenizer(), stops=(), wants_logprobs=False)
    choice = Choice(0, 0, request, text)
    first = CacheUse(16, device_tokens=32, redis_tokens=16)
    assert choice.cache_use is None
    await choice.advance(output(None, 0))
    assert choice.cache_use is None
    await choice.advance(output(first, 48, 65))
    await choice.advance(output(replace(first, device_tokens=4096), 48, 66))
    await choice.advance(output(None, 48, 67))
    assert choice.cache_use is first


def test_tiers_are_summed_over_prompts_with_every_tier_named():
    uses = [CacheUse(16, 16, 32, 48), None, CacheUse(16, redis_tokens=16)]
    assert sum_by_tier(uses) == {Tier.DEVICE: 16, Tier.DRAM: 32, Tier.REDIS: 64}
    assert list(sum_by_tier([])) == list(Tier)
