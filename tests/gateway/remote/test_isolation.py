"""Tenants kept apart on servers that all of them use."""

from __future__ import annotations

import tracemalloc
from time import monotonic, time

import pytest
from structlog.testing import capture_logs

from gateway.http_call import HttpCall
from gateway.peer import HEADER, PeerTenant, peer_tenant
from gateway.remote.attempt import Errand
from gateway.remote.body import read_body, upstream_body
from gateway.remote.isolation import Isolation
from gateway.remote.prompt import routed_prompt
from gateway.terms import TIMEOUT, Terms
from policies.service_class import ServiceClass
from tests.gateway.remote.remote_stage import ACME, COMPLETIONS, SECRET, chat, staged
from tests.gateway.remote.upstream import Upstream, answers, usage, whole
from tests.gateway.stage import tenant

BETA = tenant("beta")


async def salts_of(*calls, engine="vllm", **settings):
    upstream = Upstream([answers(200, whole())])
    async with staged(upstream, settings={"engine": engine, **settings}) as stage:
        for who, fields in calls:
            assert (await stage.post(chat(**fields), who=who)).status == 200
    return [received.body.get("cache_salt") for received in upstream.received]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_salts_are_the_tenants_whatever_clients_say(engine):
    one, again, other, stolen, mine, stolen_mine = await salts_of(
        (ACME, {}),
        (ACME, {}),
        (BETA, {}),
        (BETA, {"cache_salt": "?"}),
        (ACME, {"cache_salt": "x"}),
        (BETA, {"cache_salt": "x"}),
        engine=engine,
    )
    assert one == again
    assert len({one, other, stolen, mine, stolen_mine}) == 5
    assert all(len(salt) == 64 for salt in (one, other))


async def test_a_salt_that_a_client_has_seen_leads_nowhere():
    [seen] = await salts_of((ACME, {}))
    [stolen] = await salts_of((BETA, {"cache_salt": seen}))
    assert stolen != seen


def test_names_and_strings_cannot_run_into_each_other():
    isolation = Isolation(SECRET, "identity")

    def salt(who: str, **fields: object) -> str:
        return isolation.terms(tenant(who), read_body(chat(**fields), "chat")).salt

    assert (
        len(
            {
                salt("a", cache_salt="bc"),
                salt("ab", cache_salt="c"),
                salt("a", prompt_cache_key="bc"),
                salt("a", extra_key="bc"),
                salt("a", cache_salt="b", prompt_cache_key="c"),
                salt("a"),
                salt("cache_salt:2:bc;"),
            }
        )
        == 7
    )


async def test_who_may_share_with_nobody_gets_a_salt_of_their_own_each_time():
    nobody, by_user = tenant("n", "none"), tenant("u", "user")
    salts = await salts_of(
        (nobody, {}),
        (nobody, {}),
        (by_user, {}),
        (by_user, {}),
        (by_user, {"user": "ann"}),
        (by_user, {"user": "ann"}),
        (by_user, {"user": "bob"}),
    )
    assert len(set(salts)) == 6
    assert salts[4] == salts[5]


def test_roots_are_found_by_their_salts():
    isolation = Isolation(SECRET, "identity")
    terms = isolation.terms(ACME, read_body(chat(), "chat"))
    assert isolation.root_of(terms.salt) == terms.chain_root
    assert isolation.root_of("another") is None
    assert isolation.terms(BETA, read_body(chat(), "chat")).chain_root != terms.chain_root


def test_roots_of_whole_tenants_are_known_before_their_first_request():
    before, began_later = Isolation(SECRET, "identity"), Isolation(SECRET, "identity")
    whole = before.terms(ACME, read_body(chat(), "chat"))
    part = before.terms(ACME, read_body(chat(cache_salt="s"), "chat"))
    beta = before.terms(BETA, read_body(chat(), "chat"))
    began_later.expect([ACME.id])
    assert began_later.root_of(whole.salt) == whole.chain_root
    assert began_later.root_of(part.salt) is None
    assert began_later.root_of(beta.salt) is None
    assert began_later.terms(ACME, read_body(chat(), "chat")) == whole
    began_later.expect([BETA.id])
    assert began_later.root_of(beta.salt) == beta.chain_root


async def test_clients_own_cache_fields_go_no_further():
    upstream = Upstream([answers(200, whole())])
    fields = {"prompt_cache_key": "k", "extra_key": "e", "request_id": "r", "rid": "r"}
    async with staged(upstream) as stage:
        await stage.post(chat(**fields))
    assert not set(fields) & set(upstream.received[0].body)


@pytest.mark.parametrize(("accept", "sent"), [(False, False), (True, True)])
async def test_llama_cpp_runs_without_its_cache_unless_all_may_share_it(accept, sent):
    upstream = Upstream([answers(200, whole())])
    settings = {"engine": "llama.cpp", "shared_cache": "accept" if accept else "refuse"}
    async with staged(upstream, settings=settings) as stage:
        await stage.post(chat(cache_prompt=True))
    body = upstream.received[0].body
    assert body["cache_prompt"] is sent
    assert "cache_salt" not in body


async def test_openai_gets_its_own_key_and_no_salt():
    upstream = Upstream([answers(200, whole())])
    settings = {"engine": "openai", "shared_cache": "accept"}
    async with staged(upstream, settings=settings) as stage:
        await stage.post(chat(prompt_cache_key="k", cache_salt="s"))
    body = upstream.received[0].body
    assert body["prompt_cache_key"] == "k"
    assert "cache_salt" not in body
    assert "seed" not in body


async def test_another_forebay_is_told_whose_request_it_is():
    upstream = Upstream([answers(200, whole())])
    async with staged(upstream, settings={"engine": "forebay"}) as stage:
        await stage.post(chat(cache_salt="s", prompt_cache_key="k"))
    received = upstream.received[0]
    assert received.headers[HEADER].startswith("2.")
    assert received.body["cache_salt"] == "s"
    assert received.body["prompt_cache_key"] == "k"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "openai", "forebay"])
async def test_a_tier_is_for_forebays_alone(engine):
    upstream = Upstream([answers(200, whole(service_tier="scale"))])
    settings = {"engine": engine, "shared_cache": "accept"}
    if engine in ("vllm", "sglang", "forebay"):
        del settings["shared_cache"]
    async with staged(upstream, settings=settings) as stage:
        answer = await stage.post(chat(service_tier="flex"))
    sent = upstream.received[0].body
    assert sent.get("service_tier") == ("flex" if engine == "forebay" else None)
    assert answer.json.get("service_tier") != "scale"


async def test_another_forebay_is_told_how_urgent_it_is():
    terms = Terms(ServiceClass.BATCH, b"acme", 2.5, None, 0.08, monotonic() + 30.0, due_at_s=0.0)
    upstream = Upstream([answers(200, whole())])
    async with staged(upstream, settings={"engine": "forebay"}) as stage:
        [member] = stage.model.router.members
        body = read_body(chat(), "chat")
        prompt = await routed_prompt(body, stage.model, None)
        errand = Errand(body, prompt, ACME, "r", "", True, 1, SECRET, terms)
        with stage.model.router.place(prompt.ask(body, terms), prompt.prefix) as placement:
            assert member.load.standing().queued[0][3:5] == (b"acme", 2.5)
            sent, headers = errand.written_for(placement)
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    state = {"request_id": headers["x-request-id"]}
    scope = {"method": "POST", "path": "/", "headers": raw, "state": state}
    said = peer_tenant(HttpCall(scope, None, None), sent, SECRET, time())
    assert said == PeerTenant("acme", "tenant", ServiceClass.BATCH, 2.5, 0.0, 0.08)
    assert 29_000 < int(headers[TIMEOUT]) <= 30_000


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"service_tier": "scale"}, "service_tier"),
        ({"service_tier": 5}, "service_tier"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"stream": "yes"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cached_content": "x"}, "cached_content"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"session_params": {"id": "x"}}, "session_params"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"temperature": "hot"}, "temperature"),
        ({"user": 7}, "user"),
    ],
)
async def test_what_the_gateway_goes_by_is_checked(fields, named):
    upstream = Upstream()
    async with staged(upstream) as stage:
        answer = await stage.post({**chat(), **fields})
    assert answer.status == 400
    assert answer.json["error"]["param"] == named
    assert not upstream.received


@pytest.mark.parametrize("prompt", [None, [], 5, {}])
async def test_a_prompt_must_be_one(prompt):
    async with staged(Upstream()) as stage:
        answer = await stage.post({"model": "m", "prompt": prompt}, endpoint=COMPLETIONS)
    assert answer.status == 400
    assert answer.json["error"]["param"] == "prompt"


def test_prompts_times_n_are_the_choices():
    for prompt, choices in (("a", 3), ([1, 2], 3), (["a", "b"], 6), ([[1], [2]], 6)):
        body = read_body({"model": "m", "prompt": prompt, "n": 3}, "completions")
        assert body.choices == choices


def test_null_is_omitted_and_the_clients_seed_stays():
    body = read_body(chat(seed=5, stream=None, n=None, stream_options=None), "chat")
    sent = upstream_body(
        body, engine="vllm", served_model="s", shares_cache=False, salt="x", seed=9
    )
    assert b'"seed":5' in sent
    assert not body.stream


def test_what_clients_send_is_not_kept(monkeypatch):
    monkeypatch.setattr("gateway.remote.isolation._REMEMBERED", 4)
    isolation = Isolation(SECRET, "identity")
    long = "x" * 200_000
    tracemalloc.start()
    try:
        salts = [
            isolation.terms(ACME, read_body(chat(cache_salt=f"{long}{i}"), "chat")).salt
            for i in range(40)
        ]
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 100_000
    known = [salt for salt in salts if isolation.root_of(salt) is not None]
    assert known == salts[-4:]


NOBODY = tenant("n", "none")


async def canaries_after(*calls, engine="vllm", cached=16):
    """How often a server was found out that says it had so much cached, and what was logged."""
    upstream = Upstream([answers(200, whole(usage=usage(20, 5, cached)))])
    settings = {"engine": engine, "shared_cache": "accept"}
    with capture_logs() as logs:
        async with staged(upstream, settings=settings) as stage:
            for who, fields in calls:
                assert (await stage.post(chat(**fields), who=who)).status == 200
            failures = stage.replicas[0].isolation_failures
    errors = [line for line in logs if line["log_level"] == "error"]
    return failures, errors


@pytest.mark.parametrize("engine", ["vllm", "sglang", "forebay"])
async def test_a_server_that_passes_over_salts_is_found_out_and_named_once(engine):
    failures, errors = await canaries_after((NOBODY, {}), (NOBODY, {}), engine=engine)
    assert failures == 2
    [line] = errors
    assert "keep tenants apart" in line["event"]
    assert line["replica"].startswith("m/127.0.0.1:")


async def test_what_a_request_may_find_cached_proves_nothing():
    calls = [(ACME, {}), (NOBODY, {"n": 2})]
    assert await canaries_after(*calls) == (0, [])
    assert await canaries_after((NOBODY, {}), engine="openai") == (0, [])
    assert await canaries_after((NOBODY, {}), cached=0) == (0, [])
    assert await canaries_after((NOBODY, {}), cached=None) == (0, [])


async def test_what_a_lost_try_has_left_behind_proves_nothing():
    lost_first = Upstream([answers(500, {}), answers(200, whole())])
    async with staged(lost_first) as stage:
        assert (await stage.post(chat(), who=NOBODY)).status == 200
        assert len(stage.last.receipts()) == 2
        assert stage.replicas[0].isolation_failures == 0
