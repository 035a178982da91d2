"""Prefixes that the operator shares with every tenant."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.hashing import shared_root
from engine.errors import TemplateError
from engine.request import SharedPrefix
from gateway.shared_prefixes import PrefixIndex, SharedPrefixes
from tests.gateway.fakes import ByteTokenizer, RoleTemplate
from tests.gateway.stage import CHAT, COMPLETIONS, K1, K2, SECRET, Stage, chat, prompt, tenant

MANUAL = "This is the operator's manual, which everybody who asks may as well have read."
TAIL = " And this is a tenant's own tail, long enough to fill some blocks of sixteen tokens."
WHOLE = len(MANUAL) // 16 * 16
SYSTEM = {"role": "system", "content": MANUAL}
ROOT = b"r" * 16


async def cached(stage: Stage, text: str, key: str = K1, **fields: object) -> int:
    response = await stage.post(COMPLETIONS, prompt(text, max_tokens=1, **fields), key)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def sharing(**fields: object) -> Stage:
    return Stage(shared_prefixes=({"text": MANUAL},), **fields)


async def test_two_tenants_hit_a_shared_prefix():
    stage = sharing()
    assert await cached(stage, MANUAL + " One.", K1) == 0
    assert await cached(stage, MANUAL + " Two.", K2) == WHOLE
    (first, second) = stage.replica.requests
    assert first.shared == second.shared
    assert first.shared == SharedPrefix(shared_root(SECRET, ByteTokenizer.identity), WHOLE)
    assert first.chain_root != second.chain_root
    assert first.owner != second.owner


async def test_a_divergent_tail_is_its_tenants_own():
    stage = sharing()
    await cached(stage, MANUAL + TAIL, K1)
    assert await cached(stage, MANUAL + TAIL, K2) == WHOLE
    assert await cached(stage, MANUAL + TAIL, K2) > WHOLE
    assert await cached(stage, MANUAL + TAIL, K1) > WHOLE


async def test_what_is_not_declared_is_not_shared():
    stage = sharing()
    other = "Some other text, " + MANUAL
    await cached(stage, other, K1)
    assert await cached(stage, other, K2) == 0
    assert [request.shared for request in stage.replica.requests] == [None, None]


async def test_half_a_shared_prefix_is_shared_as_far_as_it_goes():
    stage = sharing()
    half = MANUAL[:40] + "... but then something else, up to here and beyond."
    await cached(stage, MANUAL + " One.", K1)
    assert await cached(stage, half, K2) == 32
    assert stage.replica.requests[-1].shared.tokens == 32


async def test_scope_none_shares_not_even_that():
    stage = sharing(tenants={K1: tenant("acme", cache_scope="none"), K2: tenant("beta")})
    await cached(stage, MANUAL + " One.", K2)
    assert await cached(stage, MANUAL + " Two.", K1) == 0
    assert stage.replica.requests[-1].shared is None


async def test_scope_user_shares_it_among_users_who_have_a_name():
    stage = sharing(tenants={K1: tenant("acme", cache_scope="user")})
    await cached(stage, MANUAL + TAIL, user="ann")
    assert await cached(stage, MANUAL + TAIL, user="bob") == WHOLE
    assert await cached(stage, MANUAL + TAIL) == 0


async def test_only_the_models_that_it_names_share_it():
    stage = Stage(shared_prefixes=({"text": MANUAL, "models": ["[mn]"]},))
    for model, expected in (("org/other", 0), ("m", WHOLE)):
        await cached(stage, MANUAL + " One.", K1, model=model)
        assert await cached(stage, MANUAL + " Two.", K2, model=model) == expected


class DefaultSystem(RoleTemplate):
    """Puts a system turn before a conversation that has none, as many templates do."""

    def encode(self, messages, **options) -> list[int]:
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "You are helpful."}, *messages]
        return super().encode(messages, **options)


class SystemInsideUser(RoleTemplate):
    """Shows a system turn only inside the user's turn after it."""

    def encode(self, messages, **options) -> list[int]:
        if messages and messages[0]["role"] == "system":
            if len(messages) == 1:
                return []
            text = f"[{messages[0]['content']}]{messages[1]['content']}"
            messages = [{"role": "user", "content": text}, *messages[2:]]
        return super().encode(messages, **options)


class UserFirst(RoleTemplate):
    """Refuses a conversation in which the user has not spoken."""

    def encode(self, messages, **options) -> list[int]:
        if all(message["role"] != "user" for message in messages):
            raise TemplateError("the user must speak")
        return super().encode(messages, **options)


@pytest.mark.parametrize(
    "template", [RoleTemplate(), DefaultSystem(), SystemInsideUser(), UserFirst()]
)
@pytest.mark.parametrize("role", ["system", "developer", "user"])
async def test_messages_are_shared_through_any_template(template, role):
    declared = {"messages": [{"role": role, "content": MANUAL}]}
    stage = Stage(shared_prefixes=(declared,), template=template)

    def body(question: str) -> dict:
        messages = [{"role": role, "content": MANUAL}, {"role": "user", "content": question}]
        return chat(max_tokens=1, messages=messages)

    await stage.post(CHAT, body("one"), K1)
    response = await stage.post(CHAT, body("two"), K2)
    details = response.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= WHOLE
    assert stage.replica.requests[0].shared == stage.replica.requests[1].shared


async def test_a_prefix_that_cannot_be_used_is_named_in_the_log_and_hurts_nobody(capsys):
    class Refusing(RoleTemplate):
        def encode(self, messages, **options) -> list[int]:
            if messages[0]["role"] == "system":
                raise TemplateError("no system turns here")
            return super().encode(messages, **options)

    declared = ({"messages": [SYSTEM]}, {"text": "too short"}, {"text": MANUAL})
    stage = Stage(shared_prefixes=declared, template=Refusing())
    await cached(stage, MANUAL + " One.", K1)
    assert await cached(stage, MANUAL + " Two.", K2) == WHOLE
    logged = capsys.readouterr().out
    assert "shared prefix cannot be rendered" in logged
    assert "no system turns here" in logged
    assert "shared prefix is shorter than a block" in logged
    assert "manual" not in logged


async def test_a_reload_changes_what_is_shared_at_once():
    stage = sharing()
    await cached(stage, MANUAL + " One.", K1)
    stage.shared_prefixes = ()
    stage.runtime.replace(stage.snapshot())
    assert await cached(stage, MANUAL + " Two.", K2) == 0
    stage.shared_prefixes = ({"text": MANUAL},)
    stage.runtime.replace(stage.snapshot())
    assert await cached(stage, MANUAL + " Six.", K2) == WHOLE


async def test_prefixes_are_tokenized_once_off_the_event_loop(monkeypatch):
    threads: list[bool] = []
    encode = ByteTokenizer.encode_prompt

    def watched(self, text: str) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        time.sleep(0.02)
        return encode(self, text)

    stage = sharing()
    model = (stage.app, stage.models["m"])[1]
    monkeypatch.setattr(ByteTokenizer, "encode_prompt", watched)
    shared, declared = SharedPrefixes(SECRET), stage.snapshot().settings.shared_prefixes
    first = asyncio.create_task(shared.of(model, declared))
    others = [asyncio.create_task(shared.of(model, declared)) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()  # whoever asked first may leave
    indexes = await asyncio.gather(*others)
    assert threads == [False]
    assert len({id(index) for index in indexes}) == 1
    assert await shared.of(model, declared) is indexes[0]
    assert await shared.of(model, ()) is None


async def test_a_template_that_prints_the_date_is_rendered_anew_each_day(monkeypatch):
    class Dated(RoleTemplate):
        def encode(self, messages, *, now, **options) -> list[int]:
            dated = {"role": "system", "content": f"Today is {now:%d %B %Y}."}
            return super().encode([dated, *messages], now=now, **options)

    class Clock(datetime):
        day = 1

        @classmethod
        def now(cls, tz=None):
            return datetime(2030, 1, cls.day, tzinfo=UTC)

    monkeypatch.setattr("gateway.shared_prefixes.datetime", Clock)
    monkeypatch.setattr("gateway.prompts.datetime", Clock)
    stage = Stage(shared_prefixes=({"messages": [SYSTEM]},), template=Dated())
    for day in (1, 2):
        Clock.day = day
        messages = [SYSTEM, {"role": "user", "content": "hi"}]
        await stage.post(CHAT, chat(max_tokens=1, messages=messages))
        assert stage.replica.requests[-1].shared.tokens >= WHOLE


TOKENS = st.lists(st.integers(0, 3), max_size=70)


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, max_size=6), TOKENS, st.integers(0, 70))
def test_the_longest_common_prefix_is_found(prefixes, own, kept):
    """Against a plain reading of the words: the furthest that any declared prefix agrees."""
    begun = prefixes[0][:kept] if prefixes else []
    ids = begun + own

    def agreeing(prefix: list[int]) -> int:
        whole = prefix[: len(prefix) // 16 * 16]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(ids, whole, strict=False))
        return len(list(same)) // 16 * 16

    best = max(map(agreeing, prefixes), default=0)
    found = PrefixIndex(ROOT, prefixes).find(ids)
    assert found == (SharedPrefix(ROOT, best) if best else None)


def test_a_hundred_prefixes_cost_next_to_nothing():
    begun = list(range(1000, 1000 + 512))
    index = PrefixIndex(ROOT, [[*begun, *[i] * 512] for i in range(100)])
    assert len(index) == 100
    ids = [*begun, *[57] * 500, *range(1000)]

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(100):
            found = index.find(ids)
        assert found == SharedPrefix(ROOT, (512 + 500) // 16 * 16)
        return (time.perf_counter() - started) / 100

    assert min(seconds() for _ in range(10)) < 100e-6
