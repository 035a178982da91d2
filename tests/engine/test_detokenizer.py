"""Streamed text: whole characters only, and the same however the tokens are split."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer
from engine.tokenizer import Tokenizer
from tests.engine.checkpoints import CONTROL_TOKENS, byte_tokenizer_definition
from tests.engine.spm_vocabulary import spm_tokenizer

TEXTS = st.text(
    alphabet=st.sampled_from("a b\n\u00e9\u4e16\u754c\U0001f469\u200d\U0001f4bb"), max_size=20
)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_tokenizer_definition(), path=Path("tiny"), named_tokens={})


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return spm_tokenizer(prefix_space=False)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    pieces, start = [], 0
    for cut in [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]:
        pieces.append(detokenizer.feed(ids[start:cut]))
        start = cut
    return [*pieces, detokenizer.finish()]


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=12))
def test_pieces_join_to_the_text_without_half_characters(tokenizer, text, cuts):
    ids = tokenizer.encode(text, control_tokens=False)
    pieces = in_pieces(tokenizer, ids, cuts)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 275), max_size=30), cuts=st.lists(st.integers(0, 30)))
def test_any_split_gives_the_same_text(tokenizer, ids, cuts):
    ids = [token for token in ids if token < tokenizer.vocab_size]
    joined = "".join(in_pieces(tokenizer, ids, cuts))
    assert joined == "".join(in_pieces(tokenizer, ids, []))
    # A whole decode says U+FFFD for a character that is cut off; a stream leaves it out.
    whole = tokenizer.decode(ids)
    assert whole in (joined, joined + "\ufffd")


def test_one_byte_at_a_time(byte_level):
    emoji = byte_level.encode("\U0001f600", control_tokens=False)
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.feed([token]) for token in emoji] == ["", "", "", "\U0001f600"]
    assert detokenizer.pending_bytes == b""


def test_a_cut_character_is_dropped(byte_level):
    ids = byte_level.encode("ok \U0001f600", control_tokens=False)[:-1]
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.feed(ids) == "ok "
    assert detokenizer.pending_bytes == "\U0001f600".encode()[:3]
    assert detokenizer.finish() == ""
    assert detokenizer.pending_bytes == b""


def test_impossible_bytes_become_replacement_characters(byte_level):
    def byte(value: int) -> int:
        return next(i for i in range(300) if byte_level.token_bytes(i) == bytes([value]))

    detokenizer = Detokenizer(byte_level)
    assert detokenizer.feed([byte(0xE4)]) == ""
    assert detokenizer.feed([byte(ord("a"))]) == "\ufffda"
    assert detokenizer.feed([byte(0xFF)]) == "\ufffd"


def test_control_tokens_are_not_shown(byte_level):
    text = f"a{CONTROL_TOKENS[1]}b{CONTROL_TOKENS[2]}"
    ids = byte_level.encode(text, control_tokens=True)
    assert Detokenizer(byte_level).feed(ids) == "ab"


def test_first_space_after_a_prompt_is_kept():
    tokenizer = spm_tokenizer(prefix_space=True)
    ids = tokenizer.encode("the", control_tokens=False)
    assert tokenizer.decode(ids) == "the"
    assert Detokenizer(tokenizer).feed(ids) == " the"
