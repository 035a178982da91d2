"""Bodies that are refused, each with the name of the field, and those that must not be."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from gateway.errors import ApiError
from gateway.wire.fields import Fields
from gateway.wire.json_body import parse_object
from gateway.wire.messages import read_messages
from tests.gateway.fakes import RoleTemplate
from tests.gateway.stage import CHAT, COMPLETIONS, K1, Stage, chat, error_of, prompt

USER = {"role": "user", "content": "hi"}


async def refused(path: str, body: object) -> dict:
    stage = Stage()
    response = await stage.post(path, body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert stage.replica.requests == []
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "system", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "see"},
                            {"type": "image_url", "image_url": {"url": "data:"}},
                        ],
                    }
                ]
            },
            "messages[0].content[1]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "tool", "content": "42"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"user": 5}, "user"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "nope"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
        ),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": True}, "min_tokens"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_a_wrong_chat_field_is_named(fields, param):
    for stream in (False, True):
        error = await refused(CHAT, {**chat(stream=stream), **fields})
        assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_a_wrong_completions_field_is_named(fields, param):
    assert (await refused(COMPLETIONS, {**prompt(), **fields}))["param"] == param


NULLABLE = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "cache_salt",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "modalities",
    "audio",
    "web_search_options",
    "reasoning_effort",
    "verbosity",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prediction",
]


async def test_null_means_omitted():
    response = await Stage().post(CHAT, chat(**dict.fromkeys(NULLABLE)))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"logit_bias": {}, "suffix": "x"},
        {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "user": "bob"},
        {"min_tokens": 0, "length_penalty": 1, "top_k": -1, "n": 1.0},
        {"messages": [{"role": "developer", "content": "x"}, {**USER, "name": "bob"}]},
        {"messages": [USER, {"role": "assistant", "content": ""}, USER]},
        {"messages": [USER, {"role": "assistant"}, USER]},
    ],
)
async def test_what_asks_for_nothing_else_is_accepted(fields):
    response = await Stage().post(CHAT, {**chat(), **fields})
    assert response.status_code == 200, response.text


async def test_unknown_fields_are_ignored_counted_and_logged_once(caplog, capsys):
    stage = Stage()
    for _ in range(3):
        body = chat(foo=1, bar={"x": []})
        body["messages"][0]["weird"] = 1
        assert (await stage.post(CHAT, body)).status_code == 200
    assert stage.metric("forebay_unknown_fields_total") == 9
    said = capsys.readouterr().out
    for name in ("foo", "bar", "weird"):
        assert said.count(f"field={name}") == 1
    odd = {"Bearer " + K1: 1}
    assert (await stage.post(CHAT, chat(**odd))).status_code == 200
    assert K1 not in capsys.readouterr().out


async def test_text_parts_are_joined_with_nothing_between():
    stage = Stage()
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    await stage.post(CHAT, chat(parts))
    await stage.post(CHAT, chat("one two"))
    first, second = stage.replica.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert b"type" not in bytes(i for i in first.prompt_token_ids if i < 256)


CALL = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL_TURNS = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "t1", "content": "42"},
]


@pytest.mark.parametrize("drops_content", [False, True])
async def test_a_tool_call_stays_in_the_prompt(drops_content):
    turns = [dict(turn) for turn in TOOL_TURNS]
    if drops_content:
        del turns[1]["content"]
    stage = Stage()
    assert (await stage.post(CHAT, chat() | {"messages": turns})).status_code == 200
    text = bytes(i for i in stage.replica.requests[0].prompt_token_ids if i < 256).decode()
    assert "'name': 'add'" in text
    assert "'arguments': {'a': 1}" in text  # templates print an object
    assert "tool:42" in text


async def test_a_template_without_tools_refuses_the_call_instead_of_dropping_it():
    stage = Stage(template=RoleTemplate(shows_tool_calls=False))
    error = error_of(await stage.post(CHAT, chat() | {"messages": TOOL_TURNS}))
    assert error["param"] == "messages[1].tool_calls"
    assert "template" in error["message"]


async def test_malformed_arguments_stay_text():
    stage = Stage()
    call = {"id": "t1", "function": {"name": "add", "arguments": '{"a": '}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}]
    assert (await stage.post(CHAT, chat() | {"messages": turns})).status_code == 200
    text = bytes(i for i in stage.replica.requests[0].prompt_token_ids if i < 256).decode()
    assert "'arguments': '{\"a\": '" in text


async def test_arguments_that_nest_too_deeply_stay_text():
    deep = '{"a": ' * 600 + "1" + "}" * 600
    call = {"id": "t1", "function": {"name": "add", "arguments": deep}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}]
    stage = Stage(max_context=8192)
    assert (await stage.post(CHAT, chat() | {"messages": turns})).status_code == 200
    text = bytes(i for i in stage.replica.requests[0].prompt_token_ids if i < 256).decode()
    assert f"'arguments': '{deep}'" in text


async def test_many_values_side_by_side_are_not_deep():
    metadata = {str(i): [i] for i in range(1000)}
    assert (await Stage().post(CHAT, chat(metadata=metadata))).status_code == 200


async def test_a_model_without_a_chat_template_says_where_to_go():
    error = error_of(await Stage(template=None).post(CHAT, chat()))
    assert "/v1/completions" in error["message"]


async def post_raw(stage: Stage, body: bytes, path: str = CHAT):
    async with stage.client() as client:
        return await client.post(path, content=body)


@pytest.mark.parametrize("lone", ["hi \\ud83d", "\\ude00 x", "\\ud83dx", "\\uDE00"])
@pytest.mark.parametrize(
    ("template", "param"),
    [
        ('{"model":"m","messages":[{"role":"user","content":"%s"}]}', "messages[0].content"),
        (
            '{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"%s"}]}]}',
            "messages[0].content[0].text",
        ),
        ('{"model":"%s","messages":[{"role":"user","content":"x"}]}', "model"),
        ('{"model":"m","stop":["%s"],"messages":[{"role":"user","content":"x"}]}', "stop[0]"),
        ('{"model":"m","user":"%s","messages":[{"role":"user","content":"x"}]}', "user"),
        ('{"model":"m","stream":true,"x":{"y":"%s"},"messages":[]}', "x.y"),
        ('{"model":"m","metadata":{"%s":1},"messages":[]}', "metadata"),
        (
            '{"model":"m","messages":[{"role":"assistant","tool_calls":[{"function":'
            '{"name":"f","arguments":"%s"}}]}]}',
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_a_lone_surrogate_is_refused_with_its_path(template, param, lone):
    response = await post_raw(Stage(), (template % lone).encode())
    assert response.status_code == 400
    assert error_of(response)["param"] == param


async def test_a_large_broken_body_is_refused_without_looking_for_the_place():
    large = b'{"model":"m","padding":"' + b"x" * (1 << 20) + b'","prompt":"\\ud800"}'
    response = await post_raw(Stage(), large)
    assert response.status_code == 400
    assert error_of(response)["param"] is None


@pytest.mark.parametrize("body", [b'{"a":1}', b"{"])
def test_reading_a_body_leaves_the_collector_as_it_was(body):
    for collecting in (True, False):
        (gc.enable if collecting else gc.disable)()
        try:
            with suppress(ApiError):
                parse_object(body)
            assert gc.isenabled() is collecting
        finally:
            gc.enable()


def test_every_text_of_a_conversation_counts_towards_its_length():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 9000}}
    for message in (
        {"role": "user", "content": "x" * 9000},
        {"role": "user", "content": "", "name": "x" * 9000},
        {"role": "assistant", "content": "", "reasoning_content": "x" * 9000},
        {"role": "assistant", "tool_calls": [call]},
    ):
        assert read_messages(Fields({"messages": [message]})).characters() > 9000
    turns = [{"role": "user", "content": ""}] * 1000
    assert read_messages(Fields({"messages": turns})).characters() > 10_000


async def test_a_proper_pair_is_text():
    stage = Stage()
    body = b'{"model":"m","messages":[{"role":"user","content":"\\ud83d\\ude00"}]}'
    assert (await post_raw(stage, body)).status_code == 200
    assert "😀".encode() in bytes(i for i in stage.replica.requests[0].prompt_token_ids if i < 256)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"model":"m","temperature":NaN}',
        b'{"model":"m","temperature":Infinity}',
        b'{"model":"\xff"}',
        b'{"model":"\xed\xa0\x80"}',
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"metadata":%b1%b}'
        % (b"[" * 300, b"]" * 300),
        b"[" * 100_000,
        b'{"a":"\\ud800",' + b'"b":' + b"[" * 100_000,
    ],
)
async def test_what_is_no_json_object_is_refused(body):
    response = await post_raw(Stage(), body)
    assert response.status_code == 400
    error_of(response)


async def test_errors_never_repeat_the_input():
    marker = "sk-very-secret-value"
    bodies = [
        chat(temperature=marker),
        chat(marker, stop=[marker, ""]),
        chat(response_format={"type": marker}),
        chat(logit_bias={marker: 1}),
        {"model": marker, "messages": [USER]},
        {"model": "m", "messages": marker},
        {"model": "m", "messages": [{"role": marker, "content": "x"}]},
    ]
    stage = Stage()
    for body in bodies:
        response = await stage.post(CHAT, body)
        assert response.status_code in (400, 404)
        assert marker not in response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (prompt(["a", "b", "c", "d", "e"]), "prompt"),
        (prompt(["a", "b", "c"], n=2), "n"),
        (prompt("a", n=5), "n"),
    ],
)
async def test_more_sequences_than_could_ever_run_is_a_400(body, param):
    stage = Stage(max_sequences=4)
    response = await stage.post(COMPLETIONS, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert "4 at once" in response.json()["error"]["message"]
    assert (await stage.post(COMPLETIONS, prompt(["a", "b"], n=2))).status_code == 200
