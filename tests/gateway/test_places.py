"""Concurrency limits and cache isolation, as tenants meet them."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from gateway.errors import ApiError
from gateway.places import ConcurrencyLimits
from gateway.sse import StreamTimes
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import (
    CHAT,
    COMPLETIONS,
    K1,
    K2,
    Stage,
    chat,
    error_of,
    eventually,
    prompt,
    tenant,
)


def test_a_slot_is_given_back_on_every_path():
    refusals = count(1)
    limits = ConcurrencyLimits(lambda: next(refusals))
    acme = tenant("acme", concurrency=1)
    for _ in range(3):
        with pytest.raises(RuntimeError), limits.slot(acme):
            raise RuntimeError
        with limits.slot(acme):
            with pytest.raises(ApiError) as refused, limits.slot(acme):
                pass
            assert refused.value.status == 429
            with limits.slot(tenant("beta", concurrency=1)):
                pass
        assert limits.in_flight(acme) == 0
    assert next(refusals) == 4  # each was told of


def test_a_reload_changes_the_limit_of_requests_that_are_already_there():
    limits = ConcurrencyLimits(lambda: None)
    with limits.slot(tenant(concurrency=3)), limits.slot(tenant(concurrency=3)):
        with pytest.raises(ApiError), limits.slot(tenant(concurrency=2)):
            pass
        with limits.slot(tenant(concurrency=None)):
            assert limits.in_flight(tenant()) == 3


async def test_over_the_limit_is_429_with_retry_after_and_costs_nothing():
    gate = asyncio.Event()
    stage = Stage(
        ScriptedReplica(gate=gate), tenants={K1: tenant("acme", concurrency=1), K2: tenant("beta")}
    )
    running = asyncio.create_task(stage.post(CHAT, chat(n=3)))
    await eventually(lambda: stage.replica.open == 3)
    for stream in (False, True):
        response = await stage.post(CHAT, chat(stream=stream))
        assert response.status_code == 429
        error = error_of(response)
        assert error["type"] == "rate_limit_error"
        assert error["code"] == "concurrency_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
    other = asyncio.create_task(stage.post(CHAT, chat(), K2))
    await eventually(lambda: stage.replica.open == 4)
    gate.set()
    assert (await running).status_code == (await other).status_code == 200
    assert (await stage.post(CHAT, chat())).status_code == 200
    assert stage.metric("forebay_requests_total", outcome="limited") == 2
    assert stage.metric("forebay_limit_refusals_total", kind="concurrency") == 2
    assert stage.metric("forebay_in_flight") == 0


@pytest.mark.parametrize(
    "trouble",
    [{"full": True}, {"dies_after": 2}, {"fails_after": 2}],
)
async def test_failures_do_not_lock_the_tenant_out(trouble):
    stage = Stage(
        ScriptedReplica(**trouble),
        tenants={K1: tenant("acme", concurrency=1)},
        times=StreamTimes(stall_s=1),
    )
    for stream in (False, True):
        await stage.post(CHAT, chat(stream=stream))
        await stage.post(CHAT, chat(temperature=9, stream=stream))
    for name in trouble:
        setattr(stage.replica, name, None if name != "full" else False)
    assert (await stage.post(CHAT, chat())).status_code == 200
    assert stage.metric("forebay_in_flight") == 0


async def cached(stage: Stage, key: str = K1, **fields: object) -> int:
    body = prompt("the secret prefix of a tenant, long enough for blocks", max_tokens=1, **fields)
    usage = (await stage.post(COMPLETIONS, body, key)).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


async def test_tenants_share_no_prefix_whatever_they_send():
    stage = Stage()
    assert await cached(stage, K1, cache_salt="s") == 0
    assert await cached(stage, K1, cache_salt="s") > 0
    assert await cached(stage, K2) == 0
    assert await cached(stage, K2, cache_salt="s") == 0
    assert await cached(stage, K2, prompt_cache_key="s") == 0
    assert len({request.chain_root for request in stage.replica.requests}) == 4


async def test_a_clients_salts_only_narrow():
    stage = Stage()
    assert await cached(stage) == 0
    assert await cached(stage, user="bob") > 0
    assert await cached(stage, cache_salt="a") == 0
    assert await cached(stage, prompt_cache_key="a") == 0
    assert await cached(stage, cache_salt="a", prompt_cache_key="a") == 0
    assert await cached(stage, cache_salt="a") > 0
    # the fields' edges are part of the scope
    assert await cached(stage, prompt_cache_key="a1:b;", cache_salt="c") == 0
    assert await cached(stage, prompt_cache_key="a", cache_salt="1:b;c") == 0


async def test_scope_user_keeps_users_apart_and_the_nameless_uncached():
    stage = Stage(tenants={K1: tenant("acme", cache_scope="user")})
    assert await cached(stage, user="ann") == 0
    assert await cached(stage, user="ann") > 0
    assert await cached(stage, user="bob") == 0
    assert await cached(stage, safety_identifier="ann", user="bob") > 0
    assert await cached(stage) == 0
    assert await cached(stage) == 0
    assert stage.replica.requests[-1].chain_root is None


async def test_scope_none_caches_nothing():
    stage = Stage(tenants={K1: tenant("acme", cache_scope="none")})
    assert [await cached(stage), await cached(stage)] == [0, 0]
    assert {request.chain_root for request in stage.replica.requests} == {None}
