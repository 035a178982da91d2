"""What clients ask to be kept: named prefixes, breakpoints, retention; and what Redis then has."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from tests.cache.valkey import Valkey
from tests.e2e.client import AC_KEY, ACME_KEY, CHAT, COMPLETIONS, Client, chat, completion
from tests.e2e.gateway_process import GatewayProcess, eventually
from tests.e2e.tiers import (
    BLOCK,
    OPERATOR_KEY,
    block_keys,
    cached,
    lasting_keys,
    prose,
    text,
    total,
)

HANDBOOK = prose("handbook", 250)
SYSTEM = {"role": "system", "content": HANDBOOK}
QUESTION = {"role": "user", "content": "Say one word about it."}
CREATE = {"name": "handbook", "model": "m", "messages": [SYSTEM], "ttl": "2h"}


@pytest.fixture
def acme(on_redis: GatewayProcess) -> Iterator[Client]:
    with httpx.Client(base_url=on_redis.url, timeout=120, verify=False) as http:
        yield Client(http, ACME_KEY)


@pytest.fixture
def ac(acme: Client) -> Client:
    return Client(acme.http, AC_KEY)


@pytest.fixture
def official(on_redis: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(api_key=ACME_KEY, base_url=on_redis.url + "/v1", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def handbook(on_redis: GatewayProcess, valkey: Valkey) -> dict:
    """The named prefix as it was answered when it was made; its blocks are in Redis."""
    with httpx.Client(base_url=on_redis.url, timeout=120, verify=False) as http:
        before = lasting_keys(valkey, 7200)
        made = Client(http, ACME_KEY).post("/v1/caches", CREATE)
        assert made.status_code == 201, made.text
        card: dict = made.json()
        wanted = card["tokens"] // BLOCK
        eventually(lambda: len(lasting_keys(valkey, 7200) - before) == wanted, 10)
        return card


def test_a_name_stands_for_its_messages(
    acme: Client, official: OpenAI, handbook: dict, on_redis: GatewayProcess
) -> None:
    assert handbook["object"] == "cache"
    assert 250 <= handbook["tokens"] < 600
    assert HANDBOOK not in str(handbook)
    by_name = official.chat.completions.create(
        model="m", messages=[QUESTION], temperature=0, max_tokens=8,
        extra_body={"cached_content": "handbook"},
    )  # fmt: skip
    details = by_name.usage.prompt_tokens_details
    assert details.cached_tokens >= handbook["tokens"] - BLOCK
    spelled_out = official.chat.completions.create(
        model="m", messages=[SYSTEM, QUESTION], temperature=0, max_tokens=8
    )
    assert spelled_out.choices[0].message.content == by_name.choices[0].message.content
    assert spelled_out.usage.prompt_tokens == by_name.usage.prompt_tokens
    cold = official.chat.completions.create(
        model="m", messages=[SYSTEM, QUESTION], temperature=0, max_tokens=8,
        extra_body={"cache_salt": "cold"},
    )  # fmt: skip
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cold.choices[0].message.content == by_name.choices[0].message.content
    with pytest.raises(openai.NotFoundError) as missing:
        official.chat.completions.create(
            model="m", messages=[QUESTION], extra_body={"cached_content": "no-such"}
        )
    assert missing.value.code == "cache_not_found"
    assert missing.value.param == "cached_content"
    assert HANDBOOK[20:60] not in on_redis.output


def test_names_are_the_tenants_own(acme: Client, ac: Client, handbook: dict) -> None:
    assert [each["name"] for each in acme.http.get(
        "/v1/caches", headers=acme.headers).json()["data"]] == ["handbook"]  # fmt: skip
    assert acme.http.get("/v1/caches", headers=ac.headers).json()["data"] == []
    assert acme.http.get("/v1/caches/handbook", headers=ac.headers).status_code == 404
    body = {**chat("x", max_tokens=1), "cached_content": "handbook"}
    assert ac.post(CHAT, body).status_code == 404
    assert acme.http.delete("/v1/caches/handbook", headers=ac.headers).status_code == 404
    # the same messages under another tenant are cold, whatever they are called there
    spelled = {**chat("x", max_tokens=1), "messages": [SYSTEM, QUESTION]}
    assert total(ac.post(CHAT, spelled)) == 0


def test_a_name_is_made_once_extended_and_deleted(acme: Client, handbook: dict) -> None:
    again = acme.post("/v1/caches", {**CREATE, "ttl": "3h"})
    assert again.status_code == 200
    assert again.json()["expires_at"] >= handbook["expires_at"] + 3000
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 240
    other = acme.post("/v1/caches", {**CREATE, "messages": [QUESTION]})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "cache_exists")
    longer = acme.post("/v1/caches/handbook", {"ttl": "5h"})
    assert longer.json()["expires_at"] >= again.json()["expires_at"] + 3000
    short = acme.post("/v1/caches", {**CREATE, "name": "short", "messages": [QUESTION]})
    assert short.status_code == 201
    gone = acme.http.delete("/v1/caches/short", headers=acme.headers)
    assert gone.json() == {"object": "cache.deleted", "name": "short", "deleted": True}
    assert acme.http.get("/v1/caches/short", headers=acme.headers).status_code == 404


def test_a_breakpoint_of_an_hour_is_in_redis_at_once(acme: Client, valkey: Valkey) -> None:
    kept, rest = prose("kept for an hour", 200), prose("of no importance", 100)
    parts = [
        {"type": "text", "text": kept, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": rest},
    ]
    plain = chat(kept + rest, max_tokens=4)
    marked = {**plain, "messages": [{"role": "user", "content": parts}]}
    before = lasting_keys(valkey, 3600)
    first = acme.post(CHAT, marked)
    assert total(first) == 0
    wanted = len(acme.whole("/tokenize", {"model": "m", "prompt": kept})["tokens"]) // BLOCK
    eventually(lambda: len(lasting_keys(valkey, 3600) - before) >= wanted, 10)
    # the rest was not asked to be kept
    assert len(lasting_keys(valkey, 3600) - before) <= wanted
    again = acme.post(CHAT, plain)
    assert text(again) == text(first)
    assert total(again) > wanted * BLOCK


def test_a_breakpoint_of_five_minutes_asks_nothing_of_redis(ac: Client, valkey: Valkey) -> None:
    control = {"type": "ephemeral"}
    content = [{"type": "text", "text": prose("kept a while", 150), "cache_control": control}]
    body = {**chat("", max_tokens=1), "messages": [{"role": "user", "content": content}]}
    assert total(ac.post(CHAT, body)) == 0
    assert cached(ac.post(CHAT, body))["device"] >= 128
    assert lasting_keys(valkey, 700, "ac") == set()


def test_retention_of_a_day_is_in_redis_for_a_day(acme: Client, valkey: Valkey) -> None:
    ids = acme.whole("/tokenize", {"model": "m", "prompt": prose("a day", 250)})["tokens"]
    body = completion(ids, max_tokens=1, prompt_cache_retention="24h", prompt_cache_key="k")
    before = lasting_keys(valkey, 86_400)
    assert total(acme.post(COMPLETIONS, body)) == 0
    wanted = len(ids) // BLOCK
    eventually(lambda: len(lasting_keys(valkey, 86_400) - before) == wanted, 10)
    assert total(acme.post(COMPLETIONS, body)) >= 240
    assert len(lasting_keys(valkey, 86_400) - before) == wanted
    # what lives that long narrows like anything else
    assert total(acme.post(COMPLETIONS, {**body, "prompt_cache_key": "other"})) == 0


def test_what_was_seen_twice_is_in_redis_for_the_configured_time(
    ac: Client, valkey: Valkey
) -> None:
    before = set(block_keys(valkey, "ac"))
    for _ in range(2):
        ac.whole(CHAT, chat(prose("seen twice"), max_tokens=1))
    eventually(lambda: len(lasting_keys(valkey, 600, "ac") - before) >= 20, 10)
    assert lasting_keys(valkey, 700, "ac") == set()


def test_redis_shows_no_message_of_a_name(acme: Client, valkey: Valkey, handbook: dict) -> None:
    assert acme.http.get("/v1/caches/handbook", headers=acme.headers).json()["name"] == "handbook"
    with valkey.client() as client:
        hashes = list(client.scan_iter(match=b"forebay:caches:*"))
        assert hashes
        shown = b"".join(value for key in hashes for value in client.hvals(key))
        assert all(client.ttl(key) == -1 for key in hashes)
    assert HANDBOOK.encode()[20:60] not in shown


def test_erasure_takes_names_and_blocks(
    acme: Client, ac: Client, valkey: Valkey, handbook: dict
) -> None:
    assert handbook["name"] == "handbook"
    made = ac.post("/v1/caches", {**CREATE, "messages": [QUESTION, SYSTEM]})
    assert made.status_code == 201
    eventually(lambda: len(block_keys(valkey, "ac")) >= made.json()["tokens"] // BLOCK, 10)
    operator = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    erased = acme.http.delete("/admin/tenants/ac/cache", headers=operator)
    assert (erased.status_code, erased.json()["named_prefixes"]) == (200, 1)
    assert block_keys(valkey, "ac") == []
    assert acme.http.get("/v1/caches", headers=ac.headers).json()["data"] == []
    spelled = {**chat("", max_tokens=1), "messages": [QUESTION, SYSTEM]}
    assert total(ac.post(CHAT, spelled)) == 0
    assert acme.http.get("/v1/caches/handbook", headers=acme.headers).status_code == 200
