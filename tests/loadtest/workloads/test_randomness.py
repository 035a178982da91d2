"""Tokens and texts by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.vocabulary import DEFAULT_VOCABULARY, Vocabulary
from loadtest.workloads.randomness import derived_seed, random_blocks, random_tokens
from loadtest.workloads.text import WORDS, text


@given(
    ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=8),
    first=st.integers(0, 1000),
    span=st.integers(1, 200_000),
)
@settings(max_examples=30, deadline=None)
def test_blocks_depend_on_name_and_id_alone(ids: list[int], first: int, span: int) -> None:
    vocabulary = Vocabulary(first, first + span)

    tokens = random_blocks("name", ids, 16, vocabulary)

    alone = [random_blocks("name", [number], 16, vocabulary) for number in ids]
    assert list(tokens) == [token for block in alone for token in block]
    assert min(tokens) >= first
    assert max(tokens) < first + span


def test_every_token_of_the_vocabulary_is_as_likely() -> None:
    counts = [0] * 10
    for token in random_tokens("even", 100_000, Vocabulary(5, 15)):
        counts[token - 5] += 1

    # chi square with 9 degrees of freedom is above 27.9 once in a thousand
    assert sum((count - 10_000) ** 2 / 10_000 for count in counts) < 27.9


def test_names_share_nothing() -> None:
    blocks = {
        tuple(random_blocks(name, [number], 16, DEFAULT_VOCABULARY))
        for name in ("a", "b")
        for number in range(500)
    }
    assert len(blocks) == 1000


def test_fewer_tokens_are_the_beginning_of_more() -> None:
    many = random_tokens("name", 100, DEFAULT_VOCABULARY)

    assert random_tokens("name", 40, DEFAULT_VOCABULARY) == many[:40]
    assert len(random_tokens("name", 0, DEFAULT_VOCABULARY)) == 0


def test_a_tenant_has_a_seed_of_its_own() -> None:
    seeds = {derived_seed(seed, name) for seed in range(3) for name in ("a", "b", "1/a")}

    assert len(seeds) == 9
    assert derived_seed(1, "a") == derived_seed(1, "a")


def test_tokens_and_texts_are_the_same_in_another_process() -> None:
    program = (
        "from loadtest.workloads.randomness import random_tokens;"
        "from loadtest.workloads.text import text;"
        "from loadtest.vocabulary import DEFAULT_VOCABULARY;"
        "print(list(random_tokens('x', 8, DEFAULT_VOCABULARY)), text('x', 30))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    tokens = list(random_tokens("x", 8, DEFAULT_VOCABULARY))
    assert printed == f"{tokens} {text('x', 30)}\n"


@pytest.mark.parametrize("words", [1, 2, 11, 12, 13, 100])
def test_a_text_has_as_many_words_and_stops_as_were_asked_for(words: int) -> None:
    made = text("name", words)

    assert len(made.split()) + made.count(".") == words
    assert {word.lower() for word in made.replace(".", "").split()} <= set(WORDS)


def test_no_word_is_listed_twice() -> None:
    assert len(set(WORDS)) == len(WORDS)
