"""What was said, said again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.remote.transcript import AnswerDiffers, Transcript

FIELDS = ("content", "reasoning_content", "text")


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(bounds)]


def as_choice(field: str, piece: str) -> dict:
    if field == "text":
        return {"index": 0, "text": piece}
    return {"index": 0, "delta": {field: piece}}


def said_in(choice: dict | None, field: str) -> str:
    if choice is None:
        return ""
    return choice.get("text", "") if field == "text" else choice["delta"].get(field, "")


texts = st.text(max_size=30)
cuts = st.lists(st.integers(0, 100), max_size=6)


@settings(max_examples=60, deadline=None)
@given(texts, cuts, st.lists(st.tuples(st.integers(0, 30), cuts), max_size=3), st.data())
def test_the_client_gets_the_text_once_however_often_it_is_begun(text, first, again, data):
    field = data.draw(st.sampled_from(FIELDS))
    transcript, got = Transcript(1), ""
    tries = [(data.draw(st.integers(0, 30)), first), *again]
    for stop, where in tries:
        for piece in pieces_of(text, where)[:stop]:
            got += said_in(transcript.choice(0).take(as_choice(field, piece)), field)
        assert text.startswith(got)
        transcript.rewind()
    for piece in pieces_of(text, first):
        got += said_in(transcript.choice(0).take(as_choice(field, piece)), field)
    end = transcript.choice(0).take({"index": 0, "delta": {}, "finish_reason": "stop"})
    assert got == text
    assert end is not None
    assert transcript.complete


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=20), st.text(max_size=20), cuts)
def test_another_text_is_never_taken_for_it(text, other, where):
    transcript = Transcript(1)
    transcript.choice(0).take(as_choice("content", text))
    transcript.rewind()

    def say() -> None:
        for piece in pieces_of(other, where):
            transcript.choice(0).take(as_choice("content", piece))
        transcript.choice(0).take({"index": 0, "delta": {}, "finish_reason": "stop"})

    if other.startswith(text):
        say()
    else:
        with pytest.raises(AnswerDiffers):
            say()


def test_a_role_is_said_once():
    transcript = Transcript(1)
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    assert transcript.choice(0).take(opening) == opening
    transcript.rewind()
    assert transcript.choice(0).take(opening) is None
    assert transcript.choice(0).take(as_choice("content", "a")) == as_choice("content", "a")


def test_what_cannot_be_compared_cannot_be_said_again():
    transcript = Transcript(1)
    transcript.choice(0).take({"index": 0, "delta": {"audio": {"data": "AA"}}})
    with pytest.raises(AnswerDiffers):
        transcript.rewind()


def test_logprobs_must_be_cut_where_they_were():
    transcript = Transcript(1)
    logprobs = {"content": [{"token": "ab"}]}
    transcript.choice(0).take({**as_choice("content", "a"), "logprobs": logprobs})
    transcript.rewind()
    with pytest.raises(AnswerDiffers):
        transcript.choice(0).take({**as_choice("content", "ab"), "logprobs": logprobs})


def test_a_choice_too_many_is_none():
    with pytest.raises(IndexError):
        Transcript(2).choice(2)
    with pytest.raises(IndexError):
        Transcript(2).choice(-1)
