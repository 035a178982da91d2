"""Reading a stream: the arithmetic of TTFT and TPOT, and everything that makes it a failure."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.bench.completion import Completion, Failure, completion_body, read_stream
from loadtest.wire.connection import Answer, Arrival
from tests.loadtest.fake_server import token_event, usage_event

PROMPT, OUTPUT = 128, 4


def sse(payload: bytes | dict[str, Any]) -> bytes:
    text = payload if isinstance(payload, bytes) else orjson.dumps(payload)
    return b"data: " + text + b"\n\n"


GOOD = [
    (10.5, sse(token_event("a"))),
    (10.6, sse(token_event("b"))),
    (10.7, sse(token_event(""))),
    (10.8, sse(token_event("d", "length"))),
    (10.9, sse(usage_event(PROMPT, OUTPUT, 64)) + sse(b"[DONE]")),
]


def answer(pieces: list[tuple[float, bytes]], *, status: int = 200, whole: bool = True) -> Answer:
    return Answer(status, {}, [Arrival(*piece) for piece in pieces], 10.0, 11.0, whole)


def read(
    pieces: list[tuple[float, bytes]], *, status: int = 200, whole: bool = True
) -> Completion | Failure:
    return read_stream(
        answer(pieces, status=status, whole=whole),
        pass_name="all",
        prompt_tokens=PROMPT,
        output_tokens=OUTPUT,
    )


def test_times_and_counts_of_a_whole_answer() -> None:
    completion = read(GOOD)

    assert isinstance(completion, Completion)
    assert completion.ttft_s == pytest.approx(0.5)
    assert completion.tpot_s == pytest.approx(0.3 / 3)
    assert completion.e2e_s == pytest.approx(1.0)
    assert (completion.prompt_tokens, completion.output_tokens) == (PROMPT, OUTPUT)
    assert completion.cached_tokens == 64
    assert completion.chunks == 3


def test_several_tokens_in_one_event_count_by_usage() -> None:
    completion = read(
        [
            (10.5, sse(token_event("ab"))),
            (10.8, sse(token_event("cd"))),
            (10.8, sse(token_event("", "length"))),
            (10.8, sse(usage_event(PROMPT, OUTPUT)) + sse(b"[DONE]")),
        ]
    )

    assert isinstance(completion, Completion)
    assert completion.tpot_s == pytest.approx(0.3 / 3)
    assert completion.cached_tokens is None


def test_usage_in_the_last_token_event_is_as_good() -> None:
    last = token_event("d", "length") | {"usage": usage_event(PROMPT, OUTPUT)["usage"]}

    assert isinstance(read([*GOOD[:3], (10.8, sse(last) + sse(b"[DONE]"))]), Completion)


@given(cuts=st.sets(st.integers(1, sum(len(data) for _, data in GOOD) - 1)))
@settings(max_examples=50, deadline=None)
def test_how_the_bytes_are_cut_changes_no_count(cuts: set[int]) -> None:
    stream = b"".join(data for _, data in GOOD)
    edges = [0, *sorted(cuts), len(stream)]
    pieces = [
        (10.0 + index / 1000, stream[start:end])
        for index, (start, end) in enumerate(pairwise(edges), 1)
    ]
    completion = read(pieces)

    assert isinstance(completion, Completion)
    assert (completion.output_tokens, completion.chunks) == (OUTPUT, 3)


def test_comments_other_fields_and_carriage_returns_are_passed_over() -> None:
    noisy = [
        (at_s, b": keep-alive\r\n\r\nevent: message\r\n" + data.replace(b"\n", b"\r\n"))
        for at_s, data in GOOD
    ]
    completion = read(noisy)

    assert isinstance(completion, Completion)
    assert completion.ttft_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (GOOD[:-1], "without [DONE]"),
        ([], "no token"),
        ([GOOD[-1]], "no token"),
        ([*GOOD[:3], (10.8, sse(token_event("d", "stop"))), GOOD[4]], "finish_reason is stop"),
        ([*GOOD[:3], GOOD[4]], "finish_reason is None"),
        ([*GOOD[:4], (10.9, sse(b"[DONE]"))], "no usage"),
        (
            [*GOOD[:4], (10.9, sse(usage_event(PROMPT, 3)) + sse(b"[DONE]"))],
            "usage.completion_tokens is 3, not 4",
        ),
        (
            [*GOOD[:4], (10.9, sse(usage_event(1, OUTPUT)) + sse(b"[DONE]"))],
            "usage.prompt_tokens is 1, not 128",
        ),
        (
            [GOOD[0], (10.6, sse({"error": {"message": "engine\ndied", "type": "server_error"}}))],
            "error event: engine died",
        ),
        ([(10.5, b"data: {oops\n\n")], "not JSON"),
        ([(10.5, b"data: [1]\n\n")], "not a JSON object"),
    ],
)
def test_what_is_not_a_whole_answer_is_a_failure(
    pieces: list[tuple[float, bytes]], reason: str
) -> None:
    failure = read(pieces)

    assert isinstance(failure, Failure)
    assert reason in failure.reason
    assert "\n" not in failure.reason


def test_an_answer_cut_after_its_last_event_is_still_a_failure() -> None:
    failure = read(GOOD, whole=False)

    assert isinstance(failure, Failure)
    assert "middle of the answer" in failure.reason


def test_a_refusal_shows_its_status_and_message() -> None:
    body = orjson.dumps({"error": {"message": "No such\nmodel.", "code": "model_not_found"}})

    assert read([(10.1, body)], status=404) == Failure("all", "status 404: No such model.")
    assert read([(10.1, b"<html>\n")], status=502) == Failure("all", "status 502: <html>")


def test_the_body_asks_for_greedy_tokens_of_a_fixed_length() -> None:
    assert orjson.loads(completion_body("m", (5, 6), 7)) == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "stream_options" not in orjson.loads(completion_body("m", (5,), 7, stream=False))
