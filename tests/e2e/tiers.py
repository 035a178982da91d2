"""Prompts long enough for the lower tiers, and where an answer's cached tokens came from."""

from __future__ import annotations

import random
from typing import Any

import httpx

from cache.envelope import KEY_PREFIX, header_bytes
from cache.hashing import owner_tags
from tests.cache.valkey import Valkey
from tests.e2e.client import COMPLETIONS, Client, completion
from tests.engine.wordy_checkpoint import TOKEN_KV_BYTES

BLOCK = 16
OPERATOR_KEY = "operator-4Lx8sQ2bV7nM1c"
SECRET = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"  # the server's, where a test has to know it
WORDS = (
    *("tide", "wind", "rain", "fog", "harbour", "station", "keeper", "lamp", "signal", "rope"),
    *("anchor", "north", "south", "east", "west", "reading", "noon", "evening", "morning"),
    *("gauge", "rises", "falls", "steady", "slow", "quick", "bright", "dim", "cold", "warm"),
)


def prose(name: str, words: int = 330) -> str:
    """Text that begins with its name and goes on like no other's; a word is a token of the model
    `wordy`."""
    draw = random.Random(name)
    return f"{name}: " + " ".join(draw.choice(WORDS) for _ in range(words))


def device_bytes(tokens: int) -> int:
    """A pool for so many tokens of the model `wordy` in float32."""
    return tokens * TOKEN_KV_BYTES


def dram_bytes(tokens: int) -> int:
    """A DRAM tier for as many."""
    return tokens // BLOCK * (BLOCK * TOKEN_KV_BYTES + header_bytes(BLOCK))


def cached(answer: httpx.Response) -> dict[str, int]:
    """Cached tokens by tier, as the header says; asserts that usage says their sum."""
    assert answer.status_code == 200, answer.text
    parts = answer.headers["x-forebay-cached-tiers"].split(",")
    by_tier = {tier: int(tokens) for tier, tokens in (part.split("=") for part in parts)}
    assert list(by_tier) == ["device", "dram", "redis"]
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == sum(by_tier.values())
    assert sum(by_tier.values()) < usage["prompt_tokens"]
    return by_tier


def total(answer: httpx.Response) -> int:
    """Cached tokens from whatever tier."""
    return sum(cached(answer).values())


def text(answer: httpx.Response) -> str:
    """The first choice's."""
    choice: dict[str, Any] = answer.json()["choices"][0]
    words: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return words


def push_out(client: Client, tokens: int, model: str = "m", name: str = "filler") -> None:
    """Run other prompts of so many tokens in all, so that what was on the device has to leave it;
    they are kept from nobody's Redis but by being pushed out themselves."""
    ids = client.whole("/tokenize", {"model": model, "prompt": prose(name, 520)})["tokens"]
    for number in range(-(-tokens // 512)):
        prompt = [1 + number, *ids[:511]]
        salt = {"cache_salt": f"{name} {number}"}
        client.whole(COMPLETIONS, completion(prompt, model, max_tokens=1, **salt))


def block_keys(valkey: Valkey, tenant: str | None = None, secret: str = SECRET) -> list[bytes]:
    """The keys of stored blocks, of everybody or of one tenant."""
    pattern = KEY_PREFIX + b"*"
    if tenant is not None:
        tag = owner_tags(secret.encode(), tenant, None).tenant
        pattern = KEY_PREFIX + b"*:" + tag.hex().encode() + b":*"
    with valkey.client() as client:
        return sorted(client.scan_iter(match=pattern, count=1000))


def stored_values(valkey: Valkey, keys: list[bytes]) -> list[bytes]:
    """What Redis holds under these keys."""
    with valkey.client() as client:
        return [value for value in client.mget(keys) if value is not None] if keys else []


def lasting_keys(valkey: Valkey, seconds: float, tenant: str | None = None) -> set[bytes]:
    """The keys of stored blocks that have at least so much time left, but for a minute. What was
    stored for other reasons may come in at any time, and has less."""
    keys = block_keys(valkey, tenant)
    with valkey.client() as client:
        return {key for key in keys if client.ttl(key) > seconds - 60}
