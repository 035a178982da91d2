"""Reading a stream: which event is the first token, what a reader sees, and what is no answer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.live.stream import StreamReader
from tests.loadtest.bench.test_completion import sse
from tests.loadtest.fake_server import token_event, usage_event
from tests.loadtest.live.conversations import DONE, chat_event, read_of

CHAT: list[bytes | dict[str, Any]] = [
    chat_event(role="assistant", content=""),
    chat_event(content="Hel"),
    chat_event(content="lo"),
    chat_event("stop"),
    usage_event(9, 3, 8),
    DONE,
]


def test_a_role_is_no_token_and_the_finish_ends_the_last_one() -> None:
    reader = read_of(*((float(at_s), event) for at_s, event in enumerate(CHAT)))

    assert (reader.first_s, reader.publish_s, reader.last_s) == (1.0, 1.0, 3.0)
    assert list(reader.gaps_s()) == [1.0]
    assert (reader.text, reader.finish, reader.done, reader.broken) == ("Hello", "stop", True, None)
    assert reader.usage is not None
    assert (reader.usage.completion_tokens, reader.usage.cached_tokens) == (3, 8)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_tokens_that_no_reader_sees(name: str) -> None:
    reader = read_of(
        (1.0, chat_event(**{name: "Hm."})),
        (2.0, chat_event(**{name: "Yes."})),
        (4.0, chat_event(content="Hello")),
    )

    assert (reader.first_s, reader.publish_s, reader.text) == (1.0, 4.0, "Hello")
    assert list(reader.gaps_s()) == [1.0, 2.0]


def test_a_call_of_a_tool_is_seen() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": "{"}}
    reader = read_of((1.0, chat_event(tool_calls=[call])), (2.0, chat_event("tool_calls")))

    assert (reader.first_s, reader.publish_s, reader.text) == (1.0, 1.0, "")
    assert reader.finish == "tool_calls"


def test_tokens_without_text_came_with_the_finish_reason() -> None:
    reader = read_of((1.0, token_event("")), (2.0, token_event("", "length")))

    assert (reader.first_s, reader.last_s, reader.publish_s) == (2.0, 2.0, None)
    assert len(reader.gaps_s()) == 0


def test_two_events_in_one_piece_came_at_once() -> None:
    reader = StreamReader()
    reader.take(1.0, sse(token_event("a")) + sse(token_event("b")))

    assert list(reader.gaps_s()) == [0.0]


def test_usage_says_what_it_cost() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "cost_usd": "0.000012"}
    reader = read_of((1.0, {"choices": [], "usage": usage}))

    assert reader.usage is not None
    assert (reader.usage.cost_usd, reader.usage.cached_tokens) == ("0.000012", None)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (b"{oops", "no chunk of an answer"),
        (b"[1]", "no chunk of an answer"),
        (b'{"choices": 3}', "no chunk of an answer"),
        (b'{"choices": [{"delta": {"content": 7}}]}', "no chunk of an answer"),
        (b'{"choices": [{"text": "\xff"}]}', "no chunk of an answer"),
        (b'{"error": ' + b"[" * 100_000, "no chunk of an answer"),
        ({"usage": {"prompt_tokens": 1 << 53}}, "no chunk of an answer"),
        ({"usage": {"completion_tokens": -1}}, "no chunk of an answer"),
        ({"error": {"message": "engine\ndied"}}, "error event: engine died"),
        ({"error": "gone"}, "error event: gone"),
    ],
)
def test_what_is_no_event_of_an_answer_breaks_it(event: Any, why: str) -> None:
    reader = read_of((1.0, token_event("a")), (2.0, event), (3.0, token_event("b")))

    assert reader.broken is not None
    assert why in reader.broken
    assert "\n" not in reader.broken
    assert reader.text == "a"


@given(cuts=st.sets(st.integers(1, sum(len(sse(event)) for event in CHAT) - 1)))
@settings(max_examples=40, deadline=None)
def test_how_the_bytes_are_cut_changes_nothing(cuts: set[int]) -> None:
    stream = b"".join(sse(event) for event in CHAT)
    reader = StreamReader()
    for start, end in pairwise([0, *sorted(cuts), len(stream)]):
        reader.take(float(start), stream[start:end])

    assert (reader.text, reader.finish, reader.done) == ("Hello", "stop", True)
    assert len(reader.times_s) == 2
