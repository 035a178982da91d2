"""Two servers on one Redis: whose KV is whose by dtype and block size, what a forged value does;
and how cached tokens add up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import xxhash

from cache.envelope import KEY_PREFIX
from tests.cache.valkey import Valkey
from tests.e2e.client import AC_KEY, ACME_KEY, CHAT, COMPLETIONS, Client, chat, completion
from tests.e2e.conftest import KEYS, SECRETS, TENANTS
from tests.e2e.gateway_process import GatewayProcess, Metrics, eventually
from tests.e2e.tiers import (
    BLOCK,
    block_keys,
    cached,
    device_bytes,
    dram_bytes,
    lasting_keys,
    prose,
    stored_values,
    text,
    total,
)
from tests.engine.checkpoints import CHAT_TEMPLATE, tiny_checkpoint

_IDENTITY = slice(8, 40)  # of a stored value; see cache.envelope
_CHECKSUM = slice(128, 144)
_DAY_S = 86_400
FAR_EAST = {"TZ": "Pacific/Kiritimati"}  # fourteen hours ahead of UTC


@pytest.fixture
def acme(on_redis: GatewayProcess) -> Iterator[Client]:
    with httpx.Client(base_url=on_redis.url, timeout=120, verify=False) as http:
        yield Client(http, ACME_KEY)


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose template prints the time."""
    directory = tmp_path_factory.mktemp("dated") / "model"
    tiny_checkpoint("llama", directory, max_position_embeddings=512)
    template = "{{ strftime_now('%Y-%m-%d %H') }}\n" + CHAT_TEMPLATE
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="module")
def other(
    tmp_path_factory: pytest.TempPathFactory,
    valkey: Valkey,
    on_redis: GatewayProcess,
    wordy: Path,
    dated: Path,
) -> Iterator[Client]:
    """A second server on the Redis of `on_redis`, with the same model: as it is there, in another
    dtype, and in larger blocks. Asked only for what is stored by then."""
    same = f'path: "{wordy}", max_context: 704, step_tokens: 256'
    cache = f"device: {device_bytes(896)}, dram: {dram_bytes(1456)}"
    config = f"""
server: {{port: PORT, log_format: json}}
redis: {{url: "{valkey.url}", timeout_ms: 2000, ttl: 10m}}
models:
  - {{name: same, {same}, dtype: float32, cache: {{{cache}}}}}
  - {{name: half, {same}, dtype: bfloat16, cache: {{{cache}}}}}
  - {{name: wide, {same}, dtype: float32, cache: {{{cache}, block_tokens: 32}}}}
  - {{name: dated, path: "{dated}", dtype: float32, cache: {{device: 16MiB, dram: off}}}}
{TENANTS}
"""
    environ = KEYS | SECRETS | FAR_EAST
    with GatewayProcess(tmp_path_factory.mktemp("other"), config, environ) as process:
        process.until_ready()
        with httpx.Client(base_url=process.url, timeout=120, verify=False) as http:
            yield Client(http, ACME_KEY)


def keep(client: Client, valkey: Valkey, name: str) -> tuple[httpx.Response, list[bytes]]:
    """Have a prompt stored; its cold answer, and the keys of its blocks."""
    before = lasting_keys(valkey, _DAY_S)
    answer = complete(client, "m", name, prompt_cache_retention="24h")
    blocks = answer.json()["usage"]["prompt_tokens"] // BLOCK
    eventually(lambda: len(lasting_keys(valkey, _DAY_S) - before) == blocks, 10)
    return answer, sorted(lasting_keys(valkey, _DAY_S) - before)


def complete(client: Client, model: str, name: str, **fields: object) -> httpx.Response:
    body = completion(prose(name), model, max_tokens=8, ignore_eos=True, **fields)
    return client.post(COMPLETIONS, body)


def metrics_of(client: Client) -> Metrics:
    return Metrics(client.http.get("/metrics").text)


def forged(value: bytes, identity: bytes) -> bytes:
    """The value as a server of that identity would have written it, checksum and all."""
    changed = bytearray(value)
    changed[_IDENTITY] = identity
    changed[_CHECKSUM] = bytes(16)
    changed[_CHECKSUM] = xxhash.xxh3_128_digest(changed)
    return bytes(changed)


def test_another_dtype_or_block_size_finds_nothing_of_it(
    acme: Client, other: Client, valkey: Valkey
) -> None:
    stored, _ = keep(acme, valkey, "shared by two servers")
    same = complete(other, "same", "shared by two servers")
    assert cached(same)["redis"] >= 300  # else the rest proves nothing
    assert text(same) == text(stored)
    for model in ("half", "wide"):
        first = complete(other, model, "shared by two servers")
        assert total(first) == 0
        own_cold = complete(other, model, "shared by two servers", cache_salt="cold")
        assert total(own_cold) == 0
        assert text(first) == text(own_cold)
        assert total(complete(other, model, "shared by two servers")) >= 288
    assert text(complete(other, "wide", "shared by two servers")) == text(stored)


def test_another_tenant_of_the_other_server_finds_nothing_of_it(
    acme: Client, other: Client, valkey: Valkey
) -> None:
    keep(acme, valkey, "of acme on both")
    ac = Client(other.http, AC_KEY)
    assert total(complete(ac, "same", "of acme on both")) == 0
    assert cached(complete(other, "same", "of acme on both"))["redis"] >= 300


def test_a_value_of_another_identity_under_the_right_key_is_a_miss(
    acme: Client, other: Client, valkey: Valkey
) -> None:
    stored, keys = keep(acme, valkey, "to be forged")
    values = stored_values(valkey, keys)
    with valkey.client() as client:
        for key, value in zip(keys, values, strict=True):
            client.set(key, forged(value, bytes(32)), ex=600)
    answer = complete(other, "same", "to be forged")
    assert total(answer) == 0
    assert text(answer) == text(stored)
    foreign = metrics_of(other).total(
        "forebay_cache_misses_total", replica="same/0", tier="redis", reason="foreign"
    )
    assert foreign >= 20


def test_values_of_another_dtype_under_the_right_keys_are_misses(
    acme: Client, other: Client, valkey: Valkey
) -> None:
    """What one server wrote for its own blocks is put where the other looks for the same text."""
    _, keys = keep(acme, valkey, "moved to another dtype")
    for model in ("half", "wide"):
        complete(other, model, "to learn identities", prompt_cache_retention="24h")
    identity = keys[0].removeprefix(KEY_PREFIX).split(b":")[0]
    with valkey.client() as client:

        def others() -> set[bytes]:
            found = {key.removeprefix(KEY_PREFIX).split(b":")[0] for key in block_keys(valkey)}
            return found - {identity}

        eventually(lambda: len(others()) == 2, 10)
        for theirs in others():
            for key, value in zip(keys, stored_values(valkey, keys), strict=True):
                client.set(key.replace(identity, theirs), value, ex=600)
    for model in ("half", "wide"):
        answer = complete(other, model, "moved to another dtype")
        assert total(answer) == 0
        cold = complete(other, model, "moved to another dtype", cache_salt="cold")
        assert text(answer) == text(cold)
    for model in ("half", "wide"):
        scrape = metrics_of(other)
        refused = [
            scrape.total(
                "forebay_cache_misses_total", replica=f"{model}/0", tier="redis", reason=reason
            )
            for reason in ("corrupt", "foreign")  # of another length, or of another name
        ]
        assert sum(refused) >= 1  # the first one: without it the others are not asked for


def test_cached_tokens_add_up_through_preemption(acme: Client, on_redis: GatewayProcess) -> None:
    """More long answers than the pool has room for: each prompt's hits count once, however often it
    is put back in line, by tier and in all."""
    names = ("forebay_cached_tokens_total", "forebay_cached_tokens_by_tier_total")
    names += ("forebay_prompt_tokens_total", "forebay_generated_tokens_total")
    names += ("forebay_preemptions_total", "forebay_cache_hits_total")
    common = prose("a beginning that all share", 60)

    def ask(number: int) -> httpx.Response:
        return acme.post(
            CHAT,
            chat(common + prose(f"line {number}", 50), max_tokens=64, n=1 + number % 2,
                 seed=number, temperature=0.8, logit_bias={"2": -100}),
        )  # fmt: skip

    seen = [on_redis.metrics()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            seen.append(on_redis.metrics())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, (0, 1, 2, 3, 4, 5, 1, 2)))
    finally:
        done.set()
        watcher.join()
    seen.append(on_redis.metrics())
    grown = {name: seen[-1].total(name) - seen[0].total(name) for name in names}
    assert grown["forebay_preemptions_total"] > 0  # else the rest proves little
    usages = [answer.json()["usage"] for answer in answers]
    by_tier = [cached(answer) for answer in answers]
    assert grown["forebay_cached_tokens_total"] == sum(sum(each.values()) for each in by_tier)
    for tier in ("device", "dram", "redis"):
        of_tier = [
            scrape.total("forebay_cached_tokens_by_tier_total", tier=tier) for scrape in seen
        ]
        assert of_tier[-1] - of_tier[0] == sum(each[tier] for each in by_tier)
    assert grown["forebay_prompt_tokens_total"] == sum(each["prompt_tokens"] for each in usages)
    assert grown["forebay_generated_tokens_total"] == sum(
        each["completion_tokens"] for each in usages
    )
    # a choice's hits in blocks, of which usage has one choice's each
    assert grown["forebay_cache_hits_total"] * BLOCK >= grown["forebay_cached_tokens_total"]
    for name in names:
        totals = [scrape.total(name) for scrape in seen]
        assert totals == sorted(totals), name
    on_redis.until_idle(10)


def test_a_template_that_prints_the_date_prints_it_in_utc(other: Client) -> None:
    """And so has the same prompt, and hits, wherever its servers stand; an hour or day later it is
    another prompt."""
    asked = {"model": "dated", "messages": [{"role": "user", "content": "x" * 100}]}

    def now() -> str:
        return datetime.now(UTC).strftime("%Y-%m-%d %H")

    before = now()
    ids = other.whole("/tokenize", asked)["tokens"]
    shown = other.whole("/detokenize", {"model": "dated", "tokens": ids})["prompt"]
    assert shown.splitlines()[0] in (before, now())
    body = chat("x" * 100, "dated", max_tokens=1)
    if total(other.post(CHAT, body)) == 0 and before == now():
        assert total(other.post(CHAT, body)) >= 6 * BLOCK
