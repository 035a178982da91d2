"""What a client may not say to a server behind the gateway."""

from __future__ import annotations

import pytest

from tests.gateway.remote.remote_stage import COMPLETIONS, chat, staged
from tests.gateway.remote.upstream import Upstream, answers, whole

REFUSED = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]},
    "ec_transfer_params": {"x": 1},
    "disaggregated_params": {"request_type": "generation_only"},
    "session_params": {"id": "s"},
    "bootstrap_room": 7,
    "disagg_prefill_dp_rank": 0,
    "priority": -100,
    "id_slot": 0,
    "slot_id": 0,
    "data_parallel_rank": 0,
    "routed_dp_rank": 0,
    "lora": [{"id": 0, "scale": 1.0}],
    "lora_path": "another-tenants-adapter",
    "ngram_corpus_id": "another-tenants",
    "logits_processors": ["os.system"],
    "custom_logit_processor": "gASV",
    "prompt_embeds": "AAAA",
    "input_ids": [1, 2],
    "n_cmpl": 2,
    "n_predict": 100_000,
    "return_hidden_states": True,
    "stream_interval": 100_000,
    "sse_ping_interval": 1,
    "custom_labels": {"who": "1"},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_field_of_the_servers_own_is_refused_by_name(name):
    upstream = Upstream()
    async with staged(upstream) as stage:
        answer = await stage.post(chat(**{name: REFUSED[name]}))
    assert answer.status == 400
    assert answer.json["error"]["param"] == name
    assert not upstream.received


@pytest.mark.parametrize("name", ["kv_transfer_params", "lora_path"])
async def test_nor_may_it_hide_among_vllms_extras(name):
    upstream = Upstream()
    async with staged(upstream) as stage:
        body = {"model": "m", "prompt": "hi", "vllm_xargs": {name: "x"}}
        answer = await stage.post(body, endpoint=COMPLETIONS)
    assert answer.status == 400
    assert answer.json["error"]["param"] == f"vllm_xargs.{name}"
    assert not upstream.received


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "forebay"])
async def test_what_asks_for_nothing_is_taken_out(engine):
    nothing = {
        "priority": 0,
        "id_slot": -1,
        "lora": [],
        "logits_processors": [],
        "n_cmpl": 1,
        "return_hidden_states": False,
        "kv_transfer_params": None,
    }
    upstream = Upstream([answers(200, whole())])
    async with staged(upstream, settings={"engine": engine}) as stage:
        answer = await stage.post(chat(**nothing, vllm_xargs={"mine": 1}))
    assert answer.status == 200
    sent = upstream.received[0].body
    assert not nothing.keys() & sent.keys()
    assert sent["vllm_xargs"] == {"mine": 1}


async def test_a_session_of_anothers_cannot_be_named():
    upstream = Upstream([answers(200, whole())])
    async with staged(upstream) as stage:
        await stage.post(chat(session_id="s"))
    assert "session_id" not in upstream.received[0].body
