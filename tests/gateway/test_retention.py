"""What a client wants kept: breakpoints in a chat, and the retention of a whole prompt."""

from __future__ import annotations

import threading

import pytest

from cache.block import Retention
from engine.errors import TemplateError
from tests.gateway.fakes import RoleTemplate
from tests.gateway.stage import CHAT, COMPLETIONS, Stage, chat, error_of, prompt

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
MINUTES_S, HOUR_S, DAY_S = 300, 3600, 86_400


def part(text: str, control: object = None) -> dict:
    return {"type": "text", "text": text, "cache_control": control}


async def retention(stage: Stage, messages: list, **fields: object) -> tuple[Retention, ...]:
    response = await stage.post(CHAT, chat(messages=messages, max_tokens=1, **fields))
    assert response.status_code == 200, response.text
    return stage.replica.requests[-1].retention


async def test_nothing_asked_for_is_nothing_kept():
    stage = Stage()
    assert await retention(stage, [{"role": "user", "content": "hi"}]) == ()
    assert await retention(stage, [{"role": "user", "content": [part("hi")]}]) == ()


async def test_a_breakpoint_keeps_the_prompt_to_the_end_of_its_part():
    parts = [part("first", EPHEMERAL), part("second", HOUR), part("third")]
    kept = await retention(Stage(), [{"role": "user", "content": parts}])
    # in the fake template: a control token, then "user:" and the text, one token a byte
    assert kept == (
        Retention(len("^user:first"), MINUTES_S, durable=False),
        Retention(len("^user:firstsecond"), HOUR_S, durable=True),
    )


async def test_a_breakpoint_on_a_message_keeps_the_whole_turn_and_no_more_than_the_next_ones_name():
    messages = [
        {
            "role": "system",
            "content": "be kind",
            "cache_control": {"type": "ephemeral", "ttl": "5m"},
        },
        {"role": "user", "content": [part("hello", HOUR)]},
    ]
    stage = Stage()
    (system, user) = await retention(stage, messages)
    assert len("^system:be kind$") <= system.tokens <= len("^system:be kind$^user:")
    ids = stage.replica.requests[-1].prompt_token_ids
    assert user.tokens == len("^system:be kind$^user:hello$") < len(ids)
    assert (system.seconds, user.seconds) == (MINUTES_S, HOUR_S)


async def test_the_prompt_is_the_same_with_and_without_breakpoints():
    stage = Stage()
    text = [part("a <|end|> b"), part("c")]
    marked = [part("a <|end|> b", EPHEMERAL), part("c", HOUR)]
    for content in (text, marked):
        await retention(stage, [{"role": "user", "content": content}])
    (plain, broken) = stage.replica.requests
    assert plain.prompt_token_ids == broken.prompt_token_ids
    assert plain.chain_root == broken.chain_root


async def test_a_breakpoint_on_an_assistants_tool_call_counts_the_call():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [call], "cache_control": EPHEMERAL},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    stage = Stage()
    (kept,) = await retention(stage, messages)
    shown = bytes(i for i in stage.replica.requests[-1].prompt_token_ids[: kept.tokens] if i < 256)
    assert b"'name': 'f'" in shown
    assert b"done" not in shown


async def test_a_template_that_shows_the_system_turn_inside_the_users_keeps_it_too():
    class SystemInsideUser(RoleTemplate):
        def encode(self, messages, **options) -> list[int]:
            (system, *turns) = messages
            if not turns:
                return []
            text = f"[{system['content']}]{turns[0]['content']}"
            return super().encode([{"role": "user", "content": text}, *turns[1:]], **options)

    messages = [
        {"role": "system", "content": [part("be kind", EPHEMERAL)]},
        {"role": "user", "content": "hello"},
    ]
    (kept,) = await retention(Stage(template=SystemInsideUser()), messages)
    assert kept.tokens == len("^user:[be kind]")


async def test_a_template_that_refuses_the_cut_conversation_leaves_the_whole_prompt_kept():
    class EndsWithUser(RoleTemplate):
        def encode(self, messages, *, add_generation_prompt=True, **options) -> list[int]:
            if not add_generation_prompt:
                raise TemplateError("nothing to answer")
            return super().encode(messages, **options)

    stage = Stage(template=EndsWithUser())
    (kept,) = await retention(stage, [{"role": "user", "content": [part("hi", HOUR)]}])
    assert kept == Retention(len(stage.replica.requests[0].prompt_token_ids), HOUR_S, durable=True)


async def test_breakpoints_of_a_long_prompt_are_found_off_the_event_loop(monkeypatch):
    on_loop: list[bool] = []
    encode = RoleTemplate.encode

    def watched(self, messages, **options) -> list[int]:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return encode(self, messages, **options)

    monkeypatch.setattr(RoleTemplate, "encode", watched)
    # each rendering is short enough for the event loop, the five together are not
    content = [part("x" * 1000, EPHEMERAL) for _ in range(4)]
    stage = Stage(max_context=8192)
    stage.template = RoleTemplate()
    kept = await retention(stage, [{"role": "user", "content": content}])
    assert [each.tokens for each in kept][:3] == [1006, 2006, 3006]
    assert on_loop == [False] * 5


async def test_a_prompt_that_cannot_fit_is_rendered_once(monkeypatch):
    rendered = 0
    encode = RoleTemplate.encode

    def counting(self, messages, **options) -> list[int]:
        nonlocal rendered
        rendered += 1
        return encode(self, messages, **options)

    stage = Stage(max_context=64)
    assert stage.app is not None
    monkeypatch.setattr(RoleTemplate, "encode", counting)
    messages = [{"role": "user", "content": [part("x" * 60, EPHEMERAL)]}]
    response = await stage.post(CHAT, chat(messages=messages))
    assert error_of(response)["code"] == "context_length_exceeded"
    assert rendered == 1


@pytest.mark.parametrize("given", ["in_memory", "in-memory", None])
async def test_in_memory_is_what_happens_anyway(given):
    messages = [{"role": "user", "content": "hi"}]
    assert await retention(Stage(), messages, prompt_cache_retention=given) == ()


async def test_a_day_is_kept_durably_on_both_endpoints():
    stage = Stage()
    await stage.post(CHAT, chat(prompt_cache_retention="24h"))
    await stage.post(COMPLETIONS, prompt(["one", "three"], prompt_cache_retention="24h"))
    for request in stage.replica.requests:
        whole = Retention(len(request.prompt_token_ids), DAY_S, durable=True)
        assert request.retention == (whole,)
    assert len(stage.replica.requests) == 3


async def test_breakpoints_and_a_day_go_together():
    messages = [{"role": "user", "content": [part("hi", EPHEMERAL), part("there")]}]
    kept = await retention(Stage(), messages, prompt_cache_retention="24h")
    assert [each.seconds for each in kept] == [MINUTES_S, DAY_S]


CONTROL = "messages[0].content[0].cache_control"


@pytest.mark.parametrize(
    ("control", "param"),
    [
        ("ephemeral", CONTROL),
        (True, CONTROL),
        ([], CONTROL),
        ({}, f"{CONTROL}.type"),
        ({"type": "persistent"}, f"{CONTROL}.type"),
        ({"type": 1}, f"{CONTROL}.type"),
        ({"type": "ephemeral", "ttl": "2h"}, f"{CONTROL}.ttl"),
        ({"type": "ephemeral", "ttl": ""}, f"{CONTROL}.ttl"),
        ({"type": "ephemeral", "ttl": 300}, f"{CONTROL}.ttl"),
    ],
)
async def test_a_wrong_breakpoint_is_named(control, param):
    stage = Stage()
    messages = [{"role": "user", "content": [part("hi", control)]}]
    response = await stage.post(CHAT, chat(messages=messages))
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    on_message = [{"role": "user", "content": "hi", "cache_control": control}]
    response = await stage.post(CHAT, chat(messages=on_message))
    assert response.status_code == 400
    assert error_of(response)["param"] == param.replace(".content[0]", "")
    assert stage.replica.requests == []


async def test_the_fifth_breakpoint_is_one_too_many():
    def messages(count: int) -> list:
        return [{"role": "user", "content": [part("x", HOUR) for _ in range(count)]}]

    stage = Stage()
    assert len(await retention(stage, messages(4))) == 4
    response = await stage.post(CHAT, chat(messages=messages(5)))
    assert response.status_code == 400
    assert error_of(response)["param"] == "messages[0].content[4].cache_control"


@pytest.mark.parametrize("value", ["1h", "", 24, {"type": "24h"}])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, prompt())])
async def test_a_wrong_retention_is_named(path, body, value):
    response = await Stage().post(path, {**body, "prompt_cache_retention": value})
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt_cache_retention"


async def test_unknown_fields_of_a_breakpoint_are_counted():
    stage = Stage()
    control = {"type": "ephemeral", "scope": "global"}
    await retention(stage, [{"role": "user", "content": [part("hi", control)]}])
    assert stage.metric("forebay_unknown_fields_total") == 1


async def test_tokenize_takes_marked_messages():
    messages = [{"role": "user", "content": [part("hi", EPHEMERAL)]}]
    response = await Stage().post("/tokenize", {"model": "m", "messages": messages})
    assert response.status_code == 200
