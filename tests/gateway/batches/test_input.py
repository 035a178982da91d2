"""A batch's input: cut into lines, and each line checked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batches.input_lines import InputLine, input_lines
from gateway.batches.line_check import LineCheck, LineRefused
from gateway.database.opening import Database
from gateway.models import Models
from tests.gateway.batches.stage import PATH, BatchStage, FakeLines, jsonl, line, lines
from tests.gateway.stage import K1, K2, Stage, tenant


async def cut(parts: Sequence[bytes], longest: int = 100) -> list[InputLine]:
    async def given_parts() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return [each async for each in input_lines(given_parts(), longest)]


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([b"a", b"{}", b"\n", b"\r\n", b" ", b"x" * 7]), max_size=30),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
async def test_lines_are_the_same_however_they_are_cut(pieces: list[bytes], sizes: list[int]):
    text = b"".join(pieces)
    parts, start = [], 0
    for size in sizes:
        parts.append(text[start : start + size])
        start += size
    parts.append(text[start:])
    expected = [
        InputLine(number, None if len(raw) > 6 else raw.strip())
        for number, raw in enumerate(text.split(b"\n"), start=1)
        if raw.strip() or len(raw) > 6
    ]
    assert await cut(parts, longest=6) == expected


async def test_a_byte_order_mark_is_no_part_of_the_first_line():
    assert await cut([b"\xef\xbb\xbf{}\n{}"]) == [InputLine(1, b"{}"), InputLine(2, b"{}")]


@cache
def models() -> Models:
    stage = Stage()
    assert stage.app is not None
    return stage.models


def check_of(path: str = PATH, **fields: Any) -> LineCheck:
    return LineCheck(models(), tenant("acme", **fields), path)


def checked(values: Any, check: LineCheck | None = None) -> Any:
    return (check or check_of()).check(InputLine(7, orjson.dumps(values)))


def refusal(values: Any, check: LineCheck | None = None) -> tuple[str, str | None]:
    with pytest.raises(LineRefused) as refused:
        checked(values, check)
    error = refused.value.error
    assert error.line == 7
    assert error.message
    return error.code, error.param


def without(name: str) -> dict[str, Any]:
    values = line("one")
    del values[name]
    return values


@pytest.mark.parametrize(
    ("values", "code", "param"),
    [
        ([], "invalid_json_line", None),
        (without("custom_id"), "invalid_line", "custom_id"),
        (line("one", custom_id=7), "invalid_line", "custom_id"),
        (line("one", custom_id=""), "invalid_line", "custom_id"),
        (line("one", custom_id="a\0b"), "invalid_line", "custom_id"),
        (line("x" * 513), "invalid_line", "custom_id"),
        (without("method"), "invalid_line", "method"),
        (line("one", method="GET"), "invalid_line", "method"),
        (without("url"), "invalid_line", "url"),
        (line("one", url="/v1/completions"), "mismatched_endpoint", "url"),
        (without("body"), "invalid_line", "body"),
        ({**line("one"), "body": "text"}, "invalid_line", "body"),
        (line("one", body={"model": None}), "invalid_request", "body.model"),
        (line("one", body={"model": "none"}), "model_not_found", "body.model"),
        (line("one", body={"messages": []}), "invalid_request", "body.messages"),
        (line("one", body={"messages": [{}]}), "invalid_request", "body.messages[0].role"),
        (line("one", body={"temperature": 9}), "invalid_request", "body.temperature"),
        (line("one", body={"stream": True}), "invalid_request", "body.stream"),
        (line("one", body={"tools": [{}]}), "invalid_request", "body.tools"),
    ],
)
def test_a_line_that_cannot_be_run_is_refused_by_its_field(
    values: Any, code: str, param: str | None
):
    assert refusal(values) == (code, param)


DEEP = b'{"body": %b%b}' % (b"[" * 300, b"]" * 300)


@pytest.mark.parametrize("raw", [b"{oops", b"[]", b'{"a": "\\ud800"}', b'{"\\ud800": 1}', DEEP])
def test_what_is_no_object_is_said_of_the_line(raw: bytes):
    with pytest.raises(LineRefused) as caught:
        check_of().check(InputLine(7, raw))
    error = caught.value.error
    assert (error.code, error.line) == ("invalid_json_line", 7)
    assert "body" not in error.message


def test_a_model_that_the_tenant_may_not_use_is_none():
    check = check_of(models=("org/*",))
    assert refusal(line("one"), check) == ("model_not_found", "body.model")
    assert checked(line("two", body={"model": "org/other"}), check).custom_id == "two"


def test_a_custom_id_is_used_once():
    check = check_of()
    checked(line("one"), check)
    assert refusal(line("one"), check) == ("duplicate_custom_id", "custom_id")


def prompt_line(prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, **fields}
    return {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.mark.parametrize(
    ("prompt", "fields", "tokens"),
    [
        ("x" * 98, {"max_tokens": 5}, 25 + 5),
        ("x" * 98, {}, 25 + 16),
        ([1, 2, 3], {"max_tokens": 5}, 3 + 5),
        ([[1, 2], [3]], {"max_tokens": 5, "n": 2}, 3 + 4 * 5),
        (["x" * 46, "x" * 47], {"max_tokens": 5}, 25 + 2 * 5),
    ],
)
def test_tokens_are_those_of_prompts_and_longest_answers(
    prompt: Any, fields: dict[str, Any], tokens: int
):
    new = checked(prompt_line(prompt, **fields), check_of(path="/v1/completions"))
    assert new.tokens == tokens
    assert json.loads(new.body) == {"model": "m", "prompt": prompt, **fields}


def test_a_chat_without_a_length_may_fill_the_context():
    new = checked(line("one", body={"max_tokens": None}))
    assert new.tokens == 512  # of the stage's model


async def outcome(stage: BatchStage, content: bytes, key: str = K1) -> list[tuple[int, str]]:
    batch = await stage.until(await stage.begin(content, key), "failed", "completed", key=key)
    return [(each["line"], each["code"]) for each in (batch["errors"] or {"data": []})["data"]]


async def test_an_input_that_is_none_fails_its_batch(sqlite: Database):
    stage = BatchStage(
        sqlite, batch={"max_lines": 3}, server={"body_limit": 1024}, tenants={K1: tenant("acme")}
    )
    lines_run = FakeLines()
    async with stage.gateway(lines_run):
        assert await outcome(stage, b"\n \r\n") == [(None, "empty_file")]
        assert await outcome(stage, lines(4)) == [(4, "too_many_lines")]
        assert await outcome(stage, b"\xff\xfe\n" + lines(1)) == [(1, "invalid_json_line")]
        huge = jsonl(line("one", body={"user": "x" * 2_000_000}), line("two"))
        assert await outcome(stage, huge) == [(1, "line_too_long")]
        assert not lines_run.began
        assert await outcome(stage, b"\n\n" + lines(3)) == []
        assert sum(lines_run.ended.values()) == 3


async def test_not_every_error_is_listed(sqlite: Database):
    stage = BatchStage(sqlite)
    async with stage.gateway():
        assert await outcome(stage, b"{}\n" * 500) == [(n, "invalid_line") for n in range(1, 101)]


async def test_tokens_in_line_are_bounded(database: Database):
    few = tenant("acme", enqueued_tokens=100)
    stage = BatchStage(database, tenants={K1: few, K2: tenant("beta")})
    held = FakeLines()

    async def never(name: str) -> Any:
        raise TimeoutError

    held.script = never
    async with stage.gateway(held):
        first = await stage.begin(lines(3))  # some 17 tokens each
        await stage.until(first, "in_progress")
        failed = await stage.until(await stage.begin(lines(4)), "failed")
        assert [each["code"] for each in failed["errors"]["data"]] == ["token_limit_exceeded"]
        await stage.until(await stage.begin(lines(4), K2), "in_progress", key=K2)
        await stage.post(f"/v1/batches/{first}/cancel")
        await stage.until(first, "cancelled")
        await stage.until(await stage.begin(lines(4)), "in_progress")


async def test_lines_that_ask_for_ever_so_much_hold_up_nobody(database: Database):
    """Sums of what they ask for are numbers that the database takes."""
    stage = BatchStage(database)
    async with stage.gateway(FakeLines()):
        made = []
        for most in (2**62, 10**25):
            greedy = (line(f"l{number}", body={"max_tokens": most}) for number in range(4))
            made.append(await stage.begin(jsonl(*greedy)))
        others = await stage.begin(lines(1), K2)
        assert await stage.until(others, "completed", key=K2)
        for batch in made:
            assert await stage.until(batch, "completed")
