"""/v1/caches and `cached_content`, over HTTP and against a scripted replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson
import pytest

from cache.report import CacheStats
from engine.errors import TemplateError
from gateway.settings import ModelSettings
from gateway.tenants import KeyRing, TenantCache
from tests.gateway.fakes import BOS, EOS, RoleTemplate, ScriptedReplica
from tests.gateway.stage import (
    ADMIN,
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

CACHES = "/v1/caches"
BLOCK_BYTES = 1024
HANDBOOK = "The handbook. " * 12
SYSTEM = [{"role": "system", "content": HANDBOOK}]
ENTRY_FIELDS = {
    "object",
    "name",
    "model",
    "tokens",
    "created",
    "expires_at",
    "cached_tokens",
    "bytes",
}


def cache(name: str = "handbook", **fields: object) -> dict[str, Any]:
    return {"name": name, "model": "m", "messages": SYSTEM, **fields}


def settings_of(name: str, **fields: Any) -> ModelSettings:
    return ModelSettings.model_validate({"name": name, "path": "bundled", **fields})


def stage_with(**fields: Any) -> Stage:
    """A stage whose models say how large a block is."""
    stage = Stage(**fields)
    assert stage.app is not None
    for model in stage.models.served().values():
        stage.models.add(replace(model, kv_block_tokens=16, kv_block_bytes=BLOCK_BYTES))
    return stage


async def get(stage: Stage, path: str, key: str = K1) -> Any:
    async with stage.client(key) as client:
        return await client.get(path)


async def delete(stage: Stage, path: str, key: str = K1) -> Any:
    async with stage.client(key) as client:
        return await client.delete(path)


class TestUnknownNames:
    async def test_a_misspelt_field_makes_nothing_and_is_named(self) -> None:
        stage = stage_with()
        refused = await stage.post(CACHES, cache(tll="5h"))
        assert (refused.status_code, error_of(refused)["param"]) == (400, "tll")
        assert error_of(refused)["message"].endswith("; did you mean ttl?")
        assert (await get(stage, CACHES)).json()["data"] == []

    async def test_nor_does_one_extend(self) -> None:
        stage = stage_with()
        assert (await stage.post(CACHES, cache())).status_code == 201
        refused = await stage.post(f"{CACHES}/handbook", {"time": "5h"})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "time")

    async def test_what_looks_like_no_name_is_not_repeated(self) -> None:
        refused = await stage_with().post(CACHES, cache(**{"sk-secret 1": 1}))
        assert refused.status_code == 400
        assert "secret" not in refused.text

    async def test_a_misspelt_parameter_is_named(self) -> None:
        stage = stage_with()
        assert (await get(stage, f"{CACHES}?user=ann")).status_code == 200
        asked = (await get(stage, f"{CACHES}?usr=a"), await delete(stage, f"{CACHES}/x?usr=a"))
        for refused in asked:
            assert (refused.status_code, error_of(refused)["param"]) == (400, "usr")

    async def test_an_unknown_field_of_a_message_is_passed_over_as_in_a_chat(self) -> None:
        stage = stage_with()
        made = await stage.post(CACHES, cache(messages=[{**SYSTEM[0], "colour": "red"}]))
        assert made.status_code == 201
        assert stage.metric("forebay_unknown_fields_total") == 1


class TestCreating:
    async def test_runs_the_prefix_once_and_asks_to_keep_all_of_it(self) -> None:
        stage = stage_with()
        answer = await stage.post(CACHES, cache(ttl="2h"))
        assert answer.status_code == 201, answer.text
        (ran,) = stage.replica.requests
        assert list(ran.prompt_token_ids) == [BOS, *f"system:{HANDBOOK}".encode(), EOS]
        assert ran.params.max_tokens == 1
        (kept,) = ran.retention
        assert (kept.tokens, kept.durable) == (len(ran.prompt_token_ids), True)
        assert 7199 <= kept.seconds <= 7201
        body = answer.json()
        assert set(body) == {*ENTRY_FIELDS, "usage"}
        assert body["tokens"] == len(ran.prompt_token_ids)
        assert body["bytes"] == len(ran.prompt_token_ids) // 16 * BLOCK_BYTES
        assert body["expires_at"] - body["created"] == 7200
        assert body["cached_tokens"] == 0
        assert body["usage"]["prompt_tokens"] == body["tokens"]
        assert body["usage"]["completion_tokens"] == 1

    async def test_counts_as_a_request_of_its_tenant(self) -> None:
        stage = stage_with()
        await stage.post(CACHES, cache())
        assert stage.metric("forebay_requests_total", tenant="acme", endpoint="caches") == 1
        assert stage.metric("forebay_prompt_tokens_total", tenant="acme", model="m") > 0
        assert stage.metric("forebay_in_flight", tenant="acme") == 0

    async def test_takes_one_of_the_tenants_places(self) -> None:
        stage = stage_with(
            replica=ScriptedReplica(gate=asyncio.Event()), tenants={K1: tenant(concurrency=1)}
        )
        busy = asyncio.create_task(stage.post(CHAT, chat()))
        await eventually(lambda: stage.replica.open == 1)
        async with asyncio.timeout(5):
            refused = await stage.post(CACHES, cache())
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "concurrency_limit_exceeded"
        stage.replica.gate.set()
        assert (await busy).status_code == 200

    async def test_the_same_again_is_extended_and_another_content_refused(self) -> None:
        stage = stage_with()
        first = (await stage.post(CACHES, cache(ttl=600))).json()
        again = await stage.post(CACHES, cache(ttl="1h"))
        assert again.status_code == 200
        assert again.json()["expires_at"] >= first["expires_at"] + 2900
        assert again.json()["cached_tokens"] > 0
        shorter = (await stage.post(CACHES, cache(ttl=60))).json()
        assert shorter["expires_at"] == again.json()["expires_at"]
        for other in (
            cache(messages=[{"role": "system", "content": "else"}]),
            cache(model="org/other"),
        ):
            refused = await stage.post(CACHES, other)
            assert refused.status_code == 409
            assert (error_of(refused)["code"], error_of(refused)["param"]) == (
                "cache_exists",
                "name",
            )

    async def test_a_name_that_is_being_made_is_taken(self) -> None:
        stage = stage_with(replica=ScriptedReplica(gate=asyncio.Event()))
        first = asyncio.create_task(stage.post(CACHES, cache()))
        await eventually(lambda: stage.replica.open == 1)
        assert error_of(await stage.post(CACHES, cache()))["code"] == "cache_exists"
        stage.replica.gate.set()
        assert (await first).status_code == 201

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"name": ""}, "name"),
            ({"name": "a b"}, "name"),
            ({"name": ".."}, "name"),
            ({"name": "x" * 65}, "name"),
            ({"name": None}, "name"),
            ({"ttl": 59}, "ttl"),
            ({"ttl": "31d"}, "ttl"),
            ({"ttl": "soon"}, "ttl"),
            ({"ttl": True}, "ttl"),
            ({"ttl": []}, "ttl"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"prompt_cache_key": "k"}, "prompt_cache_key"),
            ({"cache_salt": "s"}, "cache_salt"),
            ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
            ({"cached_content": "other"}, "cached_content"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "system"}]}, "messages[0].content"),
            ({"model": None}, "model"),
            ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
            ({"messages": [{"role": "user", "content": "x", "name": "y" * 40_000}]}, "messages"),
        ],
    )
    async def test_bad_input_names_its_field(self, fields: dict[str, Any], param: str) -> None:
        stage = stage_with()
        refused = await stage.post(CACHES, {**cache(), **fields})
        assert refused.status_code == 400, refused.text
        assert error_of(refused)["param"] == param
        assert stage.replica.requests == []

    async def test_an_unknown_model_and_a_missing_key_are_refused(self) -> None:
        stage = stage_with()
        assert (await stage.post(CACHES, cache(model="nope"))).status_code == 404
        for path in (CACHES, f"{CACHES}/handbook"):
            assert (await stage.post(path, cache(), key=None)).status_code == 401

    async def test_a_failed_run_leaves_no_name_behind(self) -> None:
        stage = stage_with(replica=ScriptedReplica(full=True))
        assert (await stage.post(CACHES, cache())).status_code == 503
        assert (await get(stage, f"{CACHES}/handbook")).status_code == 404
        stage.replica.full = False
        assert (await stage.post(CACHES, cache())).status_code == 201


class TestQuota:
    async def test_a_tenants_quota_holds_over_its_names(self) -> None:
        each = (len(HANDBOOK) + 9) // 16 * BLOCK_BYTES
        owner = tenant()
        owner = replace(owner, cache=TenantCache(dram_quota_bytes=2 * each))
        stage = stage_with(tenants={K1: owner, K2: tenant("beta")})
        assert (await stage.post(CACHES, cache("one"))).json()["bytes"] == each
        assert (await stage.post(CACHES, cache("two"))).status_code == 201
        refused = await stage.post(CACHES, cache("three"))
        assert refused.status_code == 409
        error = error_of(refused)
        assert error["code"] == "cache_quota_exceeded"
        assert str(each) in error["message"]
        assert str(2 * each) in error["message"]
        assert "ttl" in error["message"]
        # neither extending what is there, nor another tenant, is in its way
        assert (await stage.post(f"{CACHES}/one", {"ttl": "2h"})).status_code == 200
        assert (await stage.post(CACHES, cache("three"), key=K2)).status_code == 201
        await delete(stage, f"{CACHES}/two")
        assert (await stage.post(CACHES, cache("three"))).status_code == 201

    async def test_what_can_never_fit_is_the_requests_fault(self) -> None:
        owner = replace(tenant(), cache=TenantCache(dram_quota_bytes=BLOCK_BYTES))
        stage = stage_with(tenants={K1: owner})
        refused = await stage.post(CACHES, cache())
        assert (refused.status_code, error_of(refused)["param"]) == (400, "messages")

    async def test_without_quotas_all_tenants_share_half_of_the_tier(self) -> None:
        stage = stage_with()
        for model in stage.models.served().values():
            # the scripted replica's pool has 1,024,000 bytes
            stage.models.add(replace(model, kv_block_bytes=20_000))
        blocks = (len(HANDBOOK) + 9) // 16
        assert 2 * blocks * 20_000 < 512_000 < 3 * blocks * 20_000
        assert (await stage.post(CACHES, cache("one"))).status_code == 201
        assert (await stage.post(CACHES, cache("two"), key=K2)).status_code == 201
        refused = await stage.post(CACHES, cache("three"))
        assert (refused.status_code, error_of(refused)["code"]) == (409, "cache_quota_exceeded")
        assert "512000" in error_of(refused)["message"]
        # another model has a tier of its own
        assert (await stage.post(CACHES, cache("three", model="org/other"))).status_code == 201


class TestNames:
    async def test_are_listed_shown_extended_and_deleted(self) -> None:
        stage = stage_with()
        for name in ("b", "a"):
            await stage.post(CACHES, cache(name, ttl=600))
        listed = (await get(stage, CACHES)).json()
        assert listed["object"] == "list"
        assert [each["name"] for each in listed["data"]] == ["a", "b"]
        shown = (await get(stage, f"{CACHES}/a")).json()
        assert set(shown) == ENTRY_FIELDS
        assert HANDBOOK not in str(listed)
        extended = await stage.post(f"{CACHES}/a", {"ttl": "1d"})
        assert extended.status_code == 200
        assert extended.json()["expires_at"] >= shown["expires_at"] + 80_000
        assert 86_398 <= stage.replica.requests[-1].retention[0].seconds <= 86_401
        gone = await delete(stage, f"{CACHES}/a")
        assert gone.json() == {"object": "cache.deleted", "name": "a", "deleted": True}
        for again in (get, delete):
            refused = await again(stage, f"{CACHES}/a")
            assert (refused.status_code, error_of(refused)["code"]) == (404, "cache_not_found")
        refused = await stage.post(f"{CACHES}/a", {"ttl": "1h"})
        assert (refused.status_code, error_of(refused)["code"]) == (404, "cache_not_found")

    async def test_belong_to_their_tenant(self) -> None:
        stage = stage_with()
        await stage.post(CACHES, cache())
        assert (await get(stage, CACHES, K2)).json()["data"] == []
        assert (await get(stage, f"{CACHES}/handbook", K2)).status_code == 404
        assert (await delete(stage, f"{CACHES}/handbook", K2)).status_code == 404
        foreign = await stage.post(CHAT, chat(cached_content="handbook"), key=K2)
        assert foreign.status_code == 404
        # the same name is free for another tenant, and stands for its own content
        other = cache(messages=[{"role": "system", "content": "beta's"}])
        assert (await stage.post(CACHES, other, key=K2)).status_code == 201
        assert (await get(stage, f"{CACHES}/handbook")).json()["tokens"] > 100

    async def test_other_methods_say_what_there_is(self) -> None:
        stage = stage_with()
        async with stage.client() as client:
            refused = await client.put(f"{CACHES}/a", json={})
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, POST, DELETE")


class TestUsers:
    async def test_have_names_of_their_own_where_they_are_kept_apart(self) -> None:
        stage = stage_with(tenants={K1: tenant(cache_scope="user")})
        refused = await stage.post(CACHES, cache())
        assert (refused.status_code, error_of(refused)["param"]) == (400, "user")
        assert (await get(stage, CACHES)).status_code == 400
        assert (await stage.post(CACHES, cache(user="ann"))).status_code == 201
        assert (await get(stage, f"{CACHES}/handbook?user=ann")).status_code == 200
        assert (await get(stage, f"{CACHES}/handbook?user=bob")).status_code == 404
        assert (await get(stage, f"{CACHES}?safety_identifier=bob")).json()["data"] == []
        hit = await stage.post(CHAT, chat(cached_content="handbook", user="ann"))
        assert hit.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        for fields in ({"user": "bob"}, {}):
            refused = await stage.post(CHAT, chat(cached_content="handbook", **fields))
            assert refused.status_code == 404
        extended = await stage.post(f"{CACHES}/handbook", {"ttl": "2h", "user": "ann"})
        assert extended.json()["cached_tokens"] > 0
        assert (await delete(stage, f"{CACHES}/handbook?user=ann")).status_code == 200

    async def test_a_tenant_without_a_cache_has_none(self) -> None:
        stage = stage_with(tenants={K1: tenant(cache_scope="none")})
        assert (await stage.post(CACHES, cache())).status_code == 400
        refused = await stage.post(CHAT, chat(cached_content="handbook"))
        assert (refused.status_code, error_of(refused)["param"]) == (404, "cached_content")


class TestChats:
    async def test_with_a_named_prefix_ask_what_the_whole_messages_ask(self) -> None:
        stage = stage_with()
        made = (await stage.post(CACHES, cache())).json()
        short = await stage.post(CHAT, chat("Which day?", cached_content="handbook"))
        assert short.status_code == 200, short.text
        own = [{"role": "user", "content": "Which day?"}]
        await stage.post(CHAT, {"model": "m", "messages": [*SYSTEM, *own]})
        _, by_name, in_full = stage.replica.requests
        assert by_name.prompt_token_ids == in_full.prompt_token_ids
        assert by_name.chain_root == in_full.chain_root
        cached = short.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == made["tokens"] // 16 * 16

    async def test_keep_the_prefix_for_the_rest_of_its_time(self) -> None:
        stage = stage_with()
        made = (await stage.post(CACHES, cache(ttl="1h"))).json()
        await stage.post(CHAT, chat(cached_content="handbook", prompt_cache_retention="24h"))
        kept = {wish.tokens: wish for wish in stage.replica.requests[-1].retention}
        assert kept[made["tokens"]].durable
        assert 3590 <= kept[made["tokens"]].seconds <= 3600
        assert len(kept) == 2  # and the request's own wish for its whole prompt

    async def test_breakpoints_in_their_own_messages_still_mean_those(self) -> None:
        stage = stage_with()
        await stage.post(CACHES, cache())
        control = {"type": "ephemeral"}
        part = {"type": "text", "text": "Which day?", "cache_control": control}
        await stage.post(CHAT, chat([part], cached_content="handbook"))
        await stage.post(CHAT, {"model": "m", "messages": [*SYSTEM, *chat([part])["messages"]]})
        by_name, in_full = stage.replica.requests[-2:]
        assert set(in_full.retention) <= set(by_name.retention)
        assert in_full.retention

    async def test_stream_as_well(self) -> None:
        stage = stage_with()
        await stage.post(CACHES, cache())
        await stage.stream(CHAT, chat("x", cached_content="handbook"))
        await stage.post(CHAT, chat("x", cached_content="handbook"))
        streamed, whole = stage.replica.requests[-2:]
        assert streamed.prompt_token_ids == whole.prompt_token_ids

    async def test_name_a_cache_of_their_own_model(self) -> None:
        stage = stage_with()
        await stage.post(CACHES, cache(model="org/other"))
        refused = await stage.post(CHAT, chat(cached_content="handbook"))
        assert (refused.status_code, error_of(refused)["param"]) == (400, "cached_content")

    @pytest.mark.parametrize("name", ["nothing", "", "not a name", "x" * 1000])
    async def test_an_unknown_name_is_a_404_that_names_the_field(self, name: str) -> None:
        refused = await stage_with().post(CHAT, chat(cached_content=name))
        assert refused.status_code == 404
        error = error_of(refused)
        assert (error["code"], error["param"]) == ("cache_not_found", "cached_content")

    async def test_the_name_must_be_a_string_and_null_is_none(self) -> None:
        stage = stage_with()
        assert (await stage.post(CHAT, chat(cached_content=7))).status_code == 400
        assert (await stage.post(CHAT, chat(cached_content=None))).status_code == 200

    async def test_a_completion_has_no_such_field(self) -> None:
        stage = stage_with()
        answer = await stage.post(COMPLETIONS, prompt(cached_content="handbook"))
        assert answer.status_code == 200
        assert stage.metric("forebay_unknown_fields_total") == 1

    async def test_both_together_must_fit_the_context(self) -> None:
        stage = stage_with(max_context=256)
        await stage.post(CACHES, cache())
        refused = await stage.post(CHAT, chat("x" * 200, cached_content="handbook"))
        assert error_of(refused)["code"] == "context_length_exceeded"


async def test_a_name_is_not_kept_for_a_tenant_that_was_deleted_meanwhile() -> None:
    gate = asyncio.Event()
    stage = stage_with(replica=ScriptedReplica(gate=gate))
    before = stage.runtime.current
    making = asyncio.create_task(stage.post(CACHES, cache()))
    await eventually(lambda: stage.replica.requests)
    stage.runtime.replace(replace(before, key_ring=KeyRing(())))
    gate.set()
    assert (await making).status_code == 401
    stage.runtime.replace(before)
    assert (await get(stage, CACHES)).json()["data"] == []


async def test_a_tenants_erasure_takes_its_names() -> None:
    stage = stage_with()
    await stage.post(CACHES, cache())
    await stage.post(CACHES, cache(), key=K2)
    erased = await delete(stage, "/admin/tenants/acme/cache", ADMIN)
    assert erased.status_code == 200, erased.text
    assert erased.json()["named_prefixes"] == 1
    assert (await get(stage, CACHES)).json()["data"] == []
    assert len((await get(stage, CACHES, K2)).json()["data"]) == 1


async def test_tool_turns_are_stored_as_they_were_read() -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "42"},
    ]
    stage = stage_with()
    made = await stage.post(CACHES, cache(messages=turns))
    assert made.status_code == 201, made.text
    answer = await stage.post(CHAT, chat("and?", cached_content="handbook"))
    assert answer.status_code == 200
    await stage.post(CHAT, {"model": "m", "messages": [*turns, *chat("and?")["messages"]]})
    by_name, in_full = stage.replica.requests[-2:]
    assert by_name.prompt_token_ids == in_full.prompt_token_ids


class FoldingTemplate(RoleTemplate):
    """Shows a system turn inside the user's turn after it; alone it shows nothing, or refuses."""

    def __init__(self, *, refuses: bool) -> None:
        super().__init__()
        self._refuses = refuses

    def encode(self, messages: Any, **options: Any) -> list[int]:
        if [message["role"] for message in messages] == ["system"]:
            if self._refuses:
                raise TemplateError("a conversation needs a user")
            return [BOS]
        system, *rest = messages
        first = {**rest[0], "content": f"{system['content']}\n{rest[0]['content']}"}
        return super().encode([first, *rest[1:]], **options)


class RefusingTemplate(RoleTemplate):
    """Refuses two turns of one role in a row."""

    def encode(self, messages: Any, **options: Any) -> list[int]:
        roles = [message["role"] for message in messages]
        if any(one == other for one, other in pairwise(roles)):
            raise TemplateError("roles must alternate")
        return super().encode(messages, **options)


class TestTemplates:
    @pytest.mark.parametrize("refuses", [True, False])
    async def test_that_fold_the_system_turn_share_what_chats_begin_with(
        self, refuses: bool
    ) -> None:
        stage = stage_with(template=FoldingTemplate(refuses=refuses))
        made = await stage.post(CACHES, cache())
        assert made.status_code == 201, made.text
        prefix = list(stage.replica.requests[-1].prompt_token_ids)
        assert prefix == [BOS, *f"user:{HANDBOOK}\n".encode()]
        answer = await stage.post(CHAT, chat("Which day?", cached_content="handbook"))
        assert stage.replica.requests[-1].prompt_token_ids[: len(prefix)] == prefix
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(prefix) // 16 * 16

    async def test_that_want_roles_to_alternate_take_the_messages_alone(self) -> None:
        stage = stage_with(template=RefusingTemplate())
        user = [{"role": "user", "content": HANDBOOK}]
        assert (await stage.post(CACHES, cache(messages=user))).status_code == 201
        answer = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
        body = {"model": "m", "messages": answer, "cached_content": "handbook"}
        hit = (await stage.post(CHAT, body)).json()
        assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 100

    async def test_that_refuse_the_messages_refuse_the_name(self) -> None:
        stage = stage_with(template=RefusingTemplate())
        twice = [{"role": "system", "content": "a"}] * 2
        refused = await stage.post(CACHES, cache(messages=twice))
        assert (refused.status_code, error_of(refused)["param"]) == (400, "messages")


async def test_a_worker_that_is_down_takes_no_room_from_the_others() -> None:
    class Down(ScriptedReplica):
        def cache_stats(self) -> CacheStats:
            return CacheStats((), ())

    down, well = Down(name="m/0", alive=False), ScriptedReplica(name="m/1")
    stage = stage_with(replica=down, other_replicas=[well])
    assert (await stage.post(CACHES, cache())).status_code == 201
    stage = stage_with(replica=down)
    refused = await stage.post(CACHES, cache())
    assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_unavailable")


@pytest.mark.parametrize("path", [CACHES, CACHES + "/handbook"])
async def test_a_key_that_is_revoked_while_the_body_comes_has_nothing_done(path: str) -> None:
    stage = stage_with()
    assert (await stage.post(CACHES, cache())).status_code == 201
    ran = len(stage.replica.requests)

    async def slowly() -> AsyncIterator[bytes]:
        whole = orjson.dumps(cache("other") if path == CACHES else {"ttl": "1h"})
        yield whole[:5]
        stage.runtime.replace(replace(stage.runtime.current, key_ring=KeyRing(())))
        yield whole[5:]

    async with stage.client(K1) as client:
        response = await client.post(path, content=slowly())
    assert response.status_code == 401
    assert len(stage.replica.requests) == ran


async def test_what_stands_in_for_the_prefixs_model_is_given_its_messages() -> None:
    stage = stage_with()
    assert (await stage.post(CACHES, cache())).status_code == 201
    stage.models.configure([settings_of("m", fallbacks=["org/other"]), settings_of("org/other")])
    stage.models["m"].router.members[0].draining = True
    answer = await stage.post(CHAT, chat(cached_content="handbook"))
    assert (answer.status_code, answer.json()["model"]) == (200, "org/other")
    whole = await stage.post(CHAT, chat(messages=[*SYSTEM, *chat()["messages"]]))
    assert answer.json()["usage"]["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]
    # asked for by itself, it is another model than the prefix's
    refused = await stage.post(CHAT, chat(model="org/other", cached_content="handbook"))
    assert (refused.status_code, error_of(refused)["param"]) == (400, "cached_content")
