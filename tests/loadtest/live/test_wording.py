"""What goes over the wire for a turn."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import orjson
import pytest

from loadtest.live.wording import Wording
from loadtest.plan import Turn
from loadtest.target import Target
from loadtest.wire.connection import Endpoint
from tests.loadtest.live.conversations import said

TARGET = Target("t", Endpoint("127.0.0.1", 9, "/v1", key="sk-own"), "m")


def body_of(turn: Turn, *chat: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(Wording(TARGET, {}).body(turn, chat))
    return body


def test_an_exact_completion_asks_for_greedy_tokens_of_a_fixed_number() -> None:
    assert body_of(Turn(7, tokens=(5, 6))) == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_a_chat_says_all_that_was_said_and_its_fields_win() -> None:
    turn = Turn(7, messages=(said("b"),), exact=False, fields={"temperature": 1, "seed": 3})
    body = body_of(turn, said("a"), said("b"))

    assert body["messages"] == [said("a"), said("b")]
    assert (body["temperature"], body["seed"]) == (1, 3)
    assert "ignore_eos" not in body
    assert "prompt" not in body


@pytest.mark.parametrize(
    "tokens",
    [[300, 2], (300, 2), array("H", [300, 2]), array("q", [300, 2]), range(300, 1, -298)],
    ids=str,
)
def test_tokens_may_be_any_sequence(tokens: Any) -> None:
    assert body_of(Turn(1, tokens=tokens))["prompt"] == [300, 2]


def test_tokens_may_be_an_array_of_numpy() -> None:
    assert body_of(Turn(1, tokens=np.array([300, 2])))["prompt"] == [300, 2]  # type: ignore[arg-type] # no Sequence by its annotations


def test_each_tenant_has_its_key_and_path() -> None:
    wording = Wording(TARGET, {"acme": "sk-acme"})
    theirs = wording.request("acme", Turn(1, tokens=(1,)), b"{}").decode()
    own = wording.request("other", Turn(1, messages=(said("a"),)), b"{}").decode()

    assert theirs.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "authorization: Bearer sk-acme\r\n" in theirs
    assert own.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "authorization: Bearer sk-own\r\n" in own
    assert "x-forebay-price: include\r\n" in own


def test_no_key_is_repeated() -> None:
    wording = Wording(TARGET, {"acme": "sk-acme", "longer": "sk-own-too"})

    assert wording.without_keys("bad: sk-acme, sk-own-too, sk-own") == "bad: [key], [key], [key]"
