"""Routes, refusals, health, metrics, models: everything around the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from gateway.reload import Snapshot
from gateway.settings import ServerSettings
from gateway.tenants import KeyRing
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import (
    ADMIN,
    CHAT,
    COMPLETIONS,
    K1,
    K2,
    Stage,
    chat,
    error_of,
    prompt,
    tenant,
)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", COMPLETIONS, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health/live", 405, "method_not_allowed"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
    ],
)
async def test_what_is_not_there_says_so_in_the_envelope(method, path, status, code):
    async with Stage().client() as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    if status == 405:
        assert response.headers["allow"] in ("GET", "POST")


@pytest.mark.parametrize(
    ("path", "under_v1"),
    [
        ("/chat/completions", True),
        ("/models/m", True),
        ("/batches", True),
        ("/v1/v1/models", False),
        ("/embeddings", False),
    ],
)
async def test_a_path_without_v1_says_that_v1_is_missing(path: str, under_v1: bool) -> None:
    async with Stage().client() as client:
        response = await client.post(path)
    assert response.status_code == 404
    assert ("the base URL should end in /v1" in error_of(response)["message"]) == under_v1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/v1/detokenize"])
@pytest.mark.parametrize("key", [None, "wrong-key-0123456789", ADMIN, "", K1 + " x"])
async def test_no_key_or_a_wrong_one_is_401(path, key):
    stage = Stage()
    async with stage.client(None) as client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        response = await client.post(path, json=chat(), headers=headers)
    assert response.status_code == 401
    error = error_of(response)
    assert error["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert not key or key not in response.text
    async with stage.client(None) as client:
        assert (await client.get("/v1/models")).status_code == 401


async def test_a_model_that_may_not_be_used_looks_like_one_that_does_not_exist():
    stage = Stage(tenants={K1: tenant("acme", models=("org/*",)), K2: tenant("beta")})
    forbidden = await stage.post(CHAT, chat())
    unknown = await stage.post(CHAT, {**chat(), "model": "nope"})
    assert forbidden.status_code == unknown.status_code == 404
    assert error_of(forbidden) == error_of(unknown)
    assert error_of(unknown)["code"] == "model_not_found"
    assert error_of(unknown)["param"] == "model"
    async with stage.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert (await client.get("/v1/models/m")).status_code == 404
        card = (await client.get("/v1/models/org/other")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["org/other"]
    assert card == listed["data"][0]
    assert card["object"] == "model"
    assert isinstance(card["created"], int)
    async with stage.client(K2) as client:
        assert len((await client.get("/v1/models")).json()["data"]) == 2


async def test_a_full_engine_is_503_before_any_event():
    stage = Stage(ScriptedReplica(full=True))
    for stream in (False, True):
        response = await stage.post(CHAT, chat(stream=stream))
        assert response.status_code == 503
        assert error_of(response)["type"] == "server_error"
        assert int(response.headers["retry-after"]) >= 1
    assert stage.metric("forebay_requests_total", outcome="unavailable") == 2
    stage.replica.full = False
    assert (await stage.post(CHAT, chat())).status_code == 200


async def test_an_engine_lost_before_a_whole_answer_is_503():
    stage = Stage(ScriptedReplica(dies_after=3))
    response = await stage.post(CHAT, chat())
    assert response.status_code == 503
    assert error_of(response)["code"] == "engine_unavailable"


@pytest.mark.parametrize(
    ("trouble", "code"),
    [({"dies_after": 5}, "engine_unavailable"), ({"fails_after": 5}, "internal_error")],
)
async def test_a_broken_stream_ends_with_one_error_event_and_nothing_invented(trouble, code):
    stage = Stage(ScriptedReplica(**trouble))
    response = await stage.post(CHAT, chat(stream=True))
    assert response.status_code == 200
    blocks = response.text.strip().split("\n\n")
    assert "[DONE]" not in response.text
    assert '"finish_reason":"' not in response.text
    assert blocks[-1].startswith('data: {"error":{')
    assert f'"code":"{code}"' in blocks[-1]
    assert "secret reason" not in response.text
    assert [block for block in blocks[:-1] if '"error"' in block] == []
    assert stage.metric("forebay_requests_total", outcome="success") == 0


async def test_a_request_that_fails_alone_is_500_without_the_engines_words():
    stage = Stage(ScriptedReplica(fails_after=2))
    response = await stage.post(CHAT, chat())
    assert response.status_code == 500
    assert response.headers["x-request-id"] in error_of(response)["message"]
    assert "secret reason" not in response.text


async def test_a_bug_is_500_in_the_envelope(monkeypatch, capsys):
    def explode(*args):
        raise ZeroDivisionError("inner words")

    monkeypatch.setattr("gateway.journey.cache_terms", explode)
    response = await Stage().post(CHAT, chat())
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "inner words" not in response.text
    logged = capsys.readouterr().out
    assert "ZeroDivisionError" in logged
    assert response.headers["x-request-id"] in logged


@pytest.mark.parametrize("offered", ["my-id_1.2", "x" * 128])
async def test_a_sane_request_id_comes_back(offered):
    async with Stage().client() as client:
        for path in ("/health/live", "/nothing"):
            response = await client.get(path, headers={"x-request-id": offered})
            assert response.headers.get_list("x-request-id") == [offered]


@pytest.mark.parametrize("offered", ["", "a b", "x" * 129, "id;drop", "ü"])
async def test_an_odd_request_id_is_replaced(offered):
    async with Stage().client() as client:
        response = await client.get(
            "/version", headers=[(b"x-request-id", offered.encode("latin-1"))]
        )
    assert response.headers["x-request-id"].startswith("req-")


async def test_while_loading_only_the_api_says_503():
    stage = Stage()
    stage.lifecycle = type(stage.lifecycle)()
    async with stage.client() as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/version")).status_code == 200
        refused = await client.post(CHAT, json=chat())
    assert refused.status_code == 503
    assert error_of(refused)["code"] == "loading"
    assert "retry-after" in refused.headers


async def test_while_draining_new_calls_go_elsewhere():
    stage = Stage()
    async with stage.client() as client:
        assert (await client.get("/health/ready")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        stage.lifecycle.drain()
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).json()["reason"] == "draining"
        refused = await client.post(CHAT, json=chat())
    assert refused.status_code == 503
    assert error_of(refused)["code"] == "draining"
    assert refused.headers["connection"] == "close"


async def test_readiness_sees_a_dead_and_a_stuck_engine():
    stage = Stage()
    async with stage.client() as client:
        stage.replica.alive = False
        assert (await client.get("/health/ready")).status_code == 503
        stage.replica.alive, stage.replica.last_step_age_s = True, 999.0
        assert (await client.get("/health/ready")).status_code == 200  # idle
        stage.replica.open = 1
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200


@pytest.mark.parametrize(
    ("readers", "peer", "headers", "status"),
    [
        ("local", "127.0.0.1", {}, 200),
        ("local", "::1", {}, 200),
        ("local", "10.0.0.5", {}, 403),
        ("local", "127.0.0.1", {"x-forwarded-for": "10.0.0.5"}, 403),
        ("local", "10.0.0.5", {"authorization": f"Bearer {K1}"}, 403),
        ("admin-key", "127.0.0.1", {}, 401),
        ("admin-key", "127.0.0.1", {"authorization": f"Bearer {K1}"}, 401),
        ("admin-key", "10.0.0.5", {"authorization": f"Bearer {ADMIN}"}, 200),
        ("open", "10.0.0.5", {}, 200),
    ],
)
async def test_who_may_read_metrics(readers, peer, headers, status):
    stage = Stage(server={"metrics": readers})
    transport = httpx.ASGITransport(stage.app, client=(peer, 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        response = await client.get("/metrics", headers=headers)
    assert response.status_code == status
    if status == 200:
        assert response.headers["content-type"].startswith("text/plain")
        assert "forebay_in_flight" in response.text
    else:
        assert K1 not in str(error_of(response))


async def test_clients_add_no_series_and_no_key_shows_up_anywhere(capsys):
    stage = Stage()
    await stage.post(CHAT, chat())
    before = len(stage.metrics.render().splitlines())
    async with stage.client() as client:
        for i in range(200):
            await client.post(CHAT, json={**chat(user=f"u{i}"), "model": f"nope-{i}"})
            await client.get(f"/v1/models/x-{i}")
            await client.get(f"/path-{i}")
            await client.post(CHAT, json=chat(user=f"u{i}", **{f"field{i}": 1}))
    for key in (K1, K2, "wrong-key-0123456789"):
        await stage.post(CHAT, chat(), key)
    after = stage.metrics.render()
    assert len(after.splitlines()) < before + 250
    assert b"nope" not in after
    everything = after.decode() + "".join(capsys.readouterr())
    for key in (K1, K2, "wrong-key-0123456789"):
        assert key not in everything


async def test_cors_follows_the_configuration():
    stage = Stage(server={"cors_origins": ("https://app.example",)})
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with stage.client() as client:
        response = await client.options(CHAT, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert response.headers["x-request-id"]
        answer = await client.post(CHAT, json=chat(), headers={"origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        evil = await client.post(CHAT, json=chat(), headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in evil.headers
        snapshot = stage.runtime.current
        settings = snapshot.settings.model_copy(update={"server": ServerSettings()})
        stage.runtime.replace(Snapshot(settings, snapshot.key_ring))
        assert (await client.options(CHAT, headers=preflight)).status_code == 405


async def test_a_key_that_is_revoked_while_the_body_comes_has_nothing_tokenized():
    stage = Stage()

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"model": "m", '
        stage.runtime.replace(replace(stage.runtime.current, key_ring=KeyRing(())))
        yield b'"prompt": "x"}'

    async with stage.client() as client:
        assert (await client.post("/tokenize", content=slowly())).status_code == 401


async def test_tokenize_and_detokenize():
    stage = Stage()
    answer = (await stage.post("/tokenize", {"model": "m", "prompt": "héllo"})).json()
    assert answer == {"count": 6, "max_model_len": 512, "tokens": list("héllo".encode())}
    body = {"model": "m", "tokens": answer["tokens"]}
    assert (await stage.post("/v1/detokenize", body)).json() == {"prompt": "héllo"}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with_opening = (await stage.post("/v1/tokenize", body)).json()["tokens"]
    without = (await stage.post("/tokenize", {**body, "add_generation_prompt": False})).json()
    usage = (await stage.post(CHAT, chat("x"))).json()["usage"]
    assert len(with_opening) == usage["prompt_tokens"]
    assert len(without["tokens"]) < len(with_opening)
    for bad, param in [
        ({"model": "m"}, "prompt"),
        ({"model": "m", "prompt": "x", "messages": []}, "prompt"),
        ({"model": "m", "messages": []}, "messages"),
    ]:
        assert error_of(await stage.post("/tokenize", bad))["param"] == param
    for tokens in (None, [258], [-1], ["x"], "x"):
        response = await stage.post("/detokenize", {"model": "m", "tokens": tokens})
        assert response.status_code == 400
        assert error_of(response)["param"] == "tokens"
    assert (await stage.post("/tokenize", {"model": "no", "prompt": "x"})).status_code == 404


async def test_completions_logprobs_have_the_old_shape():
    body = prompt(list(b"Hi"), max_tokens=2, logprobs=2, echo=True)
    choice = (await Stage().post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["text"] == "HiHe"
    assert choice["logprobs"] == {
        "tokens": ["H", "i", "H", "e"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"i": -0.5, "j": -1.5},
            {"H": -0.5, "I": -1.5},
            {"e": -0.5, "f": -1.5},
        ],
        "text_offset": [0, 1, 2, 3],
    }


async def test_tokens_that_are_no_text_keep_their_own_logprobs():
    body = prompt(list("é".encode()), max_tokens=0, logprobs=3, echo=True)
    choice = (await Stage().post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert choice["logprobs"]["top_logprobs"] == [
        None,
        {"bytes:\\xa9": -0.5, "bytes:\\xaa": -1.5, "bytes:\\xab": -2.5},
    ]


async def test_scoring_a_prompt_shows_nothing_generated():
    stage = Stage()
    body = prompt(list(b"Hi!"), max_tokens=0, logprobs=1, echo=True)
    whole = (await stage.post(COMPLETIONS, body)).json()
    assert whole["choices"][0]["text"] == "Hi!"
    assert whole["choices"][0]["logprobs"]["tokens"] == ["H", "i", "!"]
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0
    (request,) = stage.replica.requests
    assert request.params.max_tokens == 1
    assert not request.read_cache
    assert stage.replica.open == 0
    assert error_of(await stage.post(COMPLETIONS, prompt(max_tokens=0)))["param"] == "max_tokens"


@pytest.mark.parametrize("stop", [None, "lo, "])
@pytest.mark.parametrize("burst", [1, 3])
async def test_chat_logprobs_name_the_shown_tokens(stop, burst):
    stage = Stage(ScriptedReplica(burst=burst))
    fields = {"logprobs": True, "top_logprobs": 2, "stop": stop}
    choice = (await stage.post(CHAT, chat(**fields))).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    text = choice["message"]["content"]
    assert "".join(entry["token"] for entry in entries) == text
    assert text == ("Hel" if stop else "Hello, world")
    assert entries[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "I", "logprob": -1.5, "bytes": [73]},
        ],
    }
    streamed = []
    for chunk in (await stage.stream(CHAT, chat(**fields)))[:-1]:
        logprobs = chunk["choices"][0]["logprobs"]
        if logprobs is not None:
            streamed += logprobs["content"]
    assert streamed == entries


async def test_sampling_reaches_the_engine_and_omissions_take_the_models_defaults():
    stage = Stage(defaults={"temperature": 0.2, "top_k": 40})
    fields = {
        "top_p": 0.9,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "007": 3},
        "seed": -3,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "max_tokens": 2,
    }
    await stage.post(CHAT, chat(**fields))
    params = stage.replica.requests[-1].params
    assert (params.temperature, params.top_k) == (0.2, 40)
    assert (params.top_p, params.min_p) == (0.9, 0.1)
    assert (params.frequency_penalty, params.presence_penalty) == (0.5, -0.5)
    assert params.repetition_penalty == 1.2
    assert params.logit_bias == {5: -100, 7: 3}
    assert params.seed == -3
    assert params.stop_token_ids == {7}
    assert params.ignore_eos
    await stage.post(CHAT, chat(temperature=0, top_k=-1))
    params = stage.replica.requests[-1].params
    assert params.plain_greedy
    assert params.top_k == 0
    await stage.post(CHAT, chat(n=2))
    seeds = [request.params.seed for request in stage.replica.requests]
    assert seeds[-1] == seeds[-2]
    assert len(set(seeds[1:])) == 2


async def test_every_authenticated_endpoint_is_counted():
    stage = Stage()
    async with stage.client() as client:
        await client.get("/v1/models")
        await client.get("/v1/models/nope")
    await stage.post("/tokenize", {"model": "m", "prompt": "x"})
    await stage.post("/detokenize", {"model": "m", "tokens": [999]})
    for endpoint, outcome in [
        ("models", "success"),
        ("models", "refused"),
        ("tokenize", "success"),
        ("detokenize", "refused"),
    ]:
        name = "forebay_requests_total"
        assert stage.metric(name, endpoint=endpoint, outcome=outcome, tenant="acme") == 1
