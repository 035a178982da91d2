"""What a client sees of an answer, streamed and not (both endpoints)."""

from __future__ import annotations

import pytest

from gateway.sse import StreamTimes
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import (
    CHAT,
    COMPLETIONS,
    K1,
    K2,
    Stage,
    chat,
    chunks,
    error_of,
    joined,
    prompt,
    tenant,
)


async def test_a_chat_answer_has_openais_shape():
    stage = Stage()
    response = await stage.post(CHAT, chat("Say hi"))
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "m"
    assert body["system_fingerprint"].startswith("fp_")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt_tokens = len("<user:Say hi><assistant:")
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 13,  # the end-of-sequence token is generated too
        "total_tokens": prompt_tokens + 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert response.headers["x-forebay-replica"] == "fake/0"
    assert response.headers["x-forebay-cached-tokens"] == "0"
    assert float(response.headers["x-forebay-queue-ms"]) >= 0
    assert float(response.headers["x-forebay-engine-ms"]) >= 0


async def test_a_stream_says_its_role_once_and_ends_with_done():
    stage = Stage()
    stream = chunks(await stage.stream(CHAT, chat("Say hi", max_tokens=8)))
    first = stream[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": ""}
    assert [c for c in stream[1:] if "role" in c["choices"][0]["delta"]] == []
    assert all(isinstance(c["choices"][0]["delta"]["content"], str) for c in stream[:-1])
    for field in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({chunk[field] for chunk in stream}) == 1
    assert joined(stream) == "Hello, w"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in stream]
    assert reasons == [None] * (len(stream) - 1) + ["length"]
    assert stream[-1]["choices"][0]["delta"] == {}


async def test_nothing_is_streamed_before_the_engine_has_produced_something():
    stage = Stage(ScriptedReplica(prefill_s=0.05), times=StreamTimes(heartbeat_s=0.01))
    response = await stage.post(CHAT, chat(stream=True))
    head, _, rest = response.text.partition("data: ")
    assert head.count(": keep-alive\n\n") >= 2
    assert head.replace(": keep-alive\n\n", "") == ""
    assert '"role":"assistant"' in rest.partition("\n\n")[0]


async def test_stream_headers_let_no_proxy_hold_it_back():
    stage = Stage()
    async with stage.client() as client:
        response = await client.post(
            CHAT, json=chat(stream=True), headers={"accept-encoding": "gzip"}
        )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    assert "content-encoding" not in response.headers


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_chunk_unless_asked_for(options):
    stage = Stage()
    stream = chunks(await stage.stream(CHAT, chat(stream_options=options)))
    assert all(chunk["choices"] for chunk in stream)
    assert all("usage" not in chunk for chunk in stream)
    assert stage.metric("forebay_generated_tokens_total") == 13


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, prompt(max_tokens=99))])
async def test_the_usage_chunk_comes_last_and_equals_the_whole_answers(path, body):
    stage = Stage()
    options = {"stream_options": {"include_usage": True}}
    stream = chunks(await stage.stream(path, {**body, **options}))
    with_usage = [chunk for chunk in stream if not chunk["choices"]]
    assert with_usage == [stream[-1]]
    assert all(chunk["usage"] is None for chunk in stream[:-1])
    whole = (await Stage().post(path, body)).json()["usage"]
    assert stream[-1]["usage"] == whole


@pytest.mark.parametrize("options", [{"include_usage": True}, {}])
async def test_stream_options_without_stream_are_refused(options):
    error = error_of(await Stage().post(CHAT, chat(stream_options=options)))
    assert error["param"] == "stream_options"


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({}, "stop", "Hello, world"),
        ({"max_tokens": 3}, "length", "Hel"),
        ({"stop": "lo, w"}, "stop", "Hel"),
        ({"stop": ["zzz", "world"]}, "stop", "Hello, "),
        ({"stop": "world peace"}, "stop", "Hello, world"),
        ({"stop_token_ids": [ord("w")]}, "stop", "Hello, "),
        ({"ignore_eos": True, "max_tokens": 15}, "length", "Hello, worldHe"),
    ],
)
async def test_how_answers_end(fields, reason, text):
    for burst in (1, 4, 50):
        stage = Stage(ScriptedReplica(burst=burst))
        whole = (await stage.post(CHAT, chat(**fields))).json()
        stream = chunks(await stage.stream(CHAT, chat(**fields)))
        assert whole["choices"][0]["finish_reason"] == reason
        assert whole["choices"][0]["message"]["content"] == text
        assert joined(stream) == text
        assert [c["choices"][0]["finish_reason"] for c in stream][-1] == reason
        assert "<|end|>" not in text
        assert stage.replica.open == 0


async def test_a_stop_string_ends_the_engines_work_and_the_count():
    stage = Stage(ScriptedReplica(answer=b"abcdefgh" * 20))
    usage = (await stage.post(CHAT, chat(stop="cde"))).json()["usage"]
    assert usage["completion_tokens"] == 5
    assert len(stage.replica.aborted) == 1
    burst = Stage(ScriptedReplica(answer=b"abcdefgh" * 20, burst=16))
    assert (await burst.post(CHAT, chat(stop="cde"))).json()["usage"]["completion_tokens"] == 5


async def test_characters_of_several_tokens_arrive_whole():
    text = "é 漢字 👩\u200d👩\u200d👧 end"
    for burst in (1, 2, 3):
        stage = Stage(ScriptedReplica(answer=text.encode(), burst=burst))
        response = await stage.post(CHAT, chat(stream=True))
        assert "\\ufffd" not in response.text
        assert "�" not in response.text
        assert joined(await stage.stream(CHAT, chat())) == text


async def test_a_cut_inside_a_character_drops_the_half():
    stage = Stage(ScriptedReplica(answer="ab👩".encode()))
    body = (await stage.post(CHAT, chat(max_tokens=4))).json()
    assert body["choices"][0]["message"]["content"] == "ab"
    assert body["choices"][0]["finish_reason"] == "length"
    assert joined(await stage.stream(CHAT, chat(max_tokens=4))) == "ab"


async def test_a_repeated_prompt_is_cached_in_whole_blocks():
    stage = Stage()
    text = "x" * 60
    usages = [(await stage.post(COMPLETIONS, prompt(text))).json()["usage"] for _ in range(2)]
    options = {"stream_options": {"include_usage": True}}
    usages.append(chunks(await stage.stream(COMPLETIONS, prompt(text, **options)))[-1]["usage"])
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in usages] == [0, 48, 48]
    assert {u["prompt_tokens"] for u in usages} == {60}
    short = [(await stage.post(COMPLETIONS, prompt("y" * 9))).json()["usage"] for _ in range(2)]
    assert [u["prompt_tokens_details"] for u in short] == [{"cached_tokens": 0}] * 2


async def test_choices_keep_openais_order_and_count_their_prompts_once():
    replica = ScriptedReplica(answers={0: b"zero", 1: b"one", 2: b"two"})
    stage = Stage(replica)
    body = prompt(["ab", "cde"], n=3, seed=7)
    whole = (await stage.post(COMPLETIONS, body)).json()
    assert [c["index"] for c in whole["choices"]] == list(range(6))
    assert [c["text"] for c in whole["choices"]] == ["zero", "one", "two"] * 2
    assert whole["usage"]["prompt_tokens"] == 5
    assert whole["usage"]["completion_tokens"] == 2 * (5 + 4 + 4)
    assert [bytes(r.prompt_token_ids) for r in replica.requests] == [b"ab"] * 3 + [b"cde"] * 3
    assert [r.params.choice_index for r in replica.requests] == [0, 1, 2] * 2
    assert {r.params.seed for r in replica.requests} == {7}
    stream = chunks(await stage.stream(COMPLETIONS, body))
    assert [joined(stream, i) for i in range(6)] == ["zero", "one", "two"] * 2
    ends = [c["choices"][0]["index"] for c in stream if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == list(range(6))


async def test_each_chat_choice_says_its_role_once():
    stage = Stage(ScriptedReplica(answers={0: b"zero", 1: b"one"}))
    stream = chunks(await stage.stream(CHAT, chat(n=2)))
    roles = [c["choices"][0]["index"] for c in stream if "role" in c["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1]
    assert joined(stream, 0) == "zero"
    assert joined(stream, 1) == "one"


async def test_one_choice_may_stop_early_while_others_go_on():
    stage = Stage(ScriptedReplica(answers={0: b"abSTOPcd", 1: b"efgh" * 10}))
    stream = chunks(await stage.stream(CHAT, chat(n=2, stop="STOP")))
    assert joined(stream, 0) == "ab"
    assert joined(stream, 1) == "efgh" * 10
    assert len(stage.replica.aborted) == 1


async def test_what_has_arrived_goes_out_in_one_event():
    stage = Stage(ScriptedReplica(burst=5))
    stream = chunks(await stage.stream(CHAT, chat()))
    texts = [c["choices"][0]["delta"].get("content") for c in stream]
    assert texts == ["", "Hello", ", wor", "ld", None]


async def test_completions_take_token_ids_and_echo_their_text():
    stage = Stage()
    body = prompt(list(b"Once "), echo=True, max_tokens=5)
    whole = (await stage.post(COMPLETIONS, body)).json()
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == "Once Hello"
    assert joined(await stage.stream(COMPLETIONS, body)) == "Once Hello"
    both = prompt([list(b"a"), list(b"b")], max_tokens=1, echo=True)
    choices = (await stage.post(COMPLETIONS, both)).json()["choices"]
    assert [c["text"] for c in choices] == ["aH", "bH"]


async def test_a_completion_without_a_length_is_as_short_as_openais():
    stage = Stage(ScriptedReplica(answer=b"x" * 100))
    usage = (await stage.post(COMPLETIONS, prompt())).json()["usage"]
    assert usage["completion_tokens"] == 16


async def test_max_completion_tokens_wins():
    stage = Stage(ScriptedReplica(answer=b"x" * 100))
    for fields, tokens in [
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 50}, 5),
        ({"max_tokens": 1, "max_completion_tokens": 40}, 40),
        ({"max_tokens": 7, "max_completion_tokens": None}, 7),
    ]:
        body = (await stage.post(CHAT, chat(**fields))).json()
        assert body["usage"]["completion_tokens"] == tokens
        assert body["choices"][0]["finish_reason"] == "length"


async def test_more_tokens_than_the_context_has_room_for_are_cut_to_the_room():
    stage = Stage(ScriptedReplica(answer=b"x" * 600), max_context=64)
    body = (await stage.post(COMPLETIONS, prompt("p" * 60, max_tokens=4096))).json()
    assert body["usage"]["completion_tokens"] == 4
    assert body["choices"][0]["finish_reason"] == "length"
    rest = (await stage.post(CHAT, chat("p"))).json()
    assert rest["usage"]["total_tokens"] == 64


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [(CHAT, chat("x" * 1536), "messages"), (COMPLETIONS, prompt("x" * 512), "prompt")],
)
async def test_a_prompt_beyond_the_context_is_refused_with_both_counts(path, body, field, stream):
    stage = Stage(max_context=512)
    error = error_of(await stage.post(path, {**body, "stream": stream}))
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == field
    assert "512" in error["message"]
    tokens = 512 if field == "prompt" else len("<user:><assistant:") + 1536
    assert str(tokens) in error["message"]
    assert stage.replica.requests == []
    assert stage.metric("forebay_prompt_tokens_total") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_tenant_may_be_shown_no_receipt(stream):
    stage = Stage(tenants={K1: tenant("acme", sees_receipt=False), K2: tenant("beta")})
    hidden = await stage.post(CHAT, chat(stream=stream))
    shown = await stage.post(CHAT, chat(stream=stream), K2)
    assert hidden.status_code == shown.status_code == 200
    assert not [name for name in hidden.headers if name.startswith("x-forebay")]
    assert shown.headers["x-forebay-replica"] == "fake/0"
