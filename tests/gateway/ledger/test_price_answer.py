"""What answers say of a request's price, and which tokens are charged as written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cache.block import Retention
from cache.report import CacheUse
from gateway.errors import ApiError
from gateway.http_call import HttpCall
from gateway.ledger.price_answer import cost_header, priced_usage, wants_price
from gateway.prompts import Prompt
from gateway.request import Relayed, Request


def call_with(*headers: tuple[bytes, bytes]) -> HttpCall:
    scope = {
        "method": "POST",
        "path": "/",
        "state": {"request_id": "req-1"},
        "headers": list(headers),
    }
    return HttpCall(scope, None, None)  # type: ignore[arg-type] # nothing is read or sent


def test_the_price_is_told_to_who_asks() -> None:
    assert not wants_price(call_with())
    assert wants_price(call_with((b"x-forebay-price", b"include")))
    assert wants_price(call_with((b"x-forebay-price", b" Include ")))
    with pytest.raises(ApiError) as refusal:
        wants_price(call_with((b"x-forebay-price", b"yes")))
    assert refusal.value.status == 400


def test_the_price_is_an_exact_decimal_number() -> None:
    usage = {"prompt_tokens": 1}
    assert priced_usage(usage, 1) == {"prompt_tokens": 1, "cost_usd": "0.000000001"}
    assert usage == {"prompt_tokens": 1}
    assert cost_header(1_234_567_890) == (b"x-forebay-cost-usd", b"1.234567890")


def request_of(
    *prompts: tuple[int, tuple[Retention, ...], list[int | None]], keep_prompt_s: int | None = None
) -> Request:
    """Prompts of so many tokens with what is to be kept of them, and what their choices found in
    the cache."""
    generation = SimpleNamespace(keep_prompt_s=keep_prompt_s)
    choices: list[Any] = []
    for index, (_, _, found) in enumerate(prompts):
        for cached in found:
            use = None if cached is None else CacheUse(16, device_tokens=cached)
            choices.append(SimpleNamespace(prompt_index=index, cache_use=use))
    task: Any = SimpleNamespace(generation=generation)
    snapshot: Any = None
    return Request(
        call_with(),
        "chat",
        snapshot,
        task=task,
        prompts=[Prompt([1] * tokens, None, retention=kept) for tokens, kept, _ in prompts],
        choices=choices,
    )


def test_nothing_is_written_unless_it_is_asked_for() -> None:
    assert request_of((100, (), [0])).written_tokens() == 0


def test_the_longest_part_to_keep_counts_less_what_was_cached() -> None:
    kept = (Retention(30, 300), Retention(64, 3600, durable=True))
    assert request_of((100, kept, [0])).written_tokens() == 64
    assert request_of((100, kept, [48])).written_tokens() == 16
    assert request_of((100, kept, [80])).written_tokens() == 0


def test_the_whole_prompt_may_be_kept() -> None:
    assert request_of((100, (), [16]), keep_prompt_s=86_400).written_tokens() == 84


def test_each_prompt_counts_once_and_only_if_it_ran() -> None:
    kept = (Retention(50, 300),)
    request = request_of((100, kept, [0, 32]), (60, kept, [16]), (60, kept, [None]))
    assert request.written_tokens() == 50 + 34


def test_what_runs_elsewhere_writes_nothing_here() -> None:
    request = request_of((100, (Retention(50, 300),), [0]))
    request.relayed = Relayed()
    assert request.written_tokens() == 0
    request = request_of((100, (), [0]))
    request.task = None
    assert request.written_tokens() == 0
