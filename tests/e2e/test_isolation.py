"""Five tenants on one small gateway whose Redis is sealed: who hits what, in which tier, before and
after a restart and an erasure."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.cache.valkey import Valkey, running_valkey
from tests.e2e.client import CHAT, Client, chat
from tests.e2e.gateway_process import SERVE, GatewayProcess, eventually
from tests.e2e.tiers import (
    OPERATOR_KEY,
    SECRET,
    block_keys,
    cached,
    device_bytes,
    dram_bytes,
    prose,
    push_out,
    stored_values,
    text,
    total,
)

POOL_TOKENS = 800
OTHER_SECRET = "a-secret-of-somebody-elses-9Kd4"
RULES = prose("house rules", 220)
TENANTS = ("acme", "ac", "gone", "a", "ab")
KEYS = {name: f"sk-{name}-6Tq1Zw8Rv3Lp0Yx5" for name in TENANTS}
ENVIRON = {f"KEY_{name.upper()}": key for name, key in KEYS.items()} | {
    "FOREBAY_ADMIN_KEY": OPERATOR_KEY,
    "FOREBAY_SECRET": SECRET,
}
MANUAL = {"messages": [{"role": "user", "content": prose("manual", 250)}], "ttl": "1h"}


def config(valkey: Valkey, model: Path) -> str:
    users = "cache: {scope: user}"
    tenants = "\n".join(
        f"  - {{id: {name}, keys: [{{env: KEY_{name.upper()}}}], {users if name in 'ab' else ''}}}"
        for name in TENANTS
    )
    return f"""
server: {{port: PORT, log_format: json}}
redis: {{url: "{valkey.url}", encrypt: true, timeout_ms: 2000}}
models:
  - {{name: m, path: "{model}", dtype: float32, max_context: 704, step_tokens: 256,
     cache: {{device: {device_bytes(816)}, dram: {dram_bytes(7280)}}}}}
tenants:
{tenants}
shared_prefixes:
  - messages: [{{role: system, content: "{RULES}"}}]
"""


@dataclass
class Running:
    """A gateway and everybody's way in."""

    gateway: GatewayProcess
    http: httpx.Client
    valkey: Valkey

    def __getitem__(self, tenant: str) -> Client:
        return Client(self.http, KEYS[tenant])

    def ask(self, tenant: str, name: str, words: int = 330, **fields: object) -> httpx.Response:
        """A chat about one text of that many words; two tokens of answer."""
        return self[tenant].post(CHAT, chat(prose(name, words), max_tokens=2, **fields))

    def ask_by_the_rules(self, tenant: str, question: str, **fields: object) -> httpx.Response:
        """A chat that begins with what the operator shares."""
        body = chat(question, max_tokens=2, **fields)
        body["messages"].insert(0, {"role": "system", "content": RULES})
        return self[tenant].post(CHAT, body)

    def erase(self, path: str) -> dict[str, Any]:
        """An erasure, which must be whole."""
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        answer = self.http.delete(f"/admin/tenants/{path}", headers=headers)
        assert answer.status_code == 200, answer.text
        erased: dict[str, Any] = answer.json()
        assert erased["complete"]
        return erased

    def command(self, *arguments: str) -> str:
        """What `forebay cache` prints."""
        command = [SERVE[0], "cache", *arguments, "--url", self.gateway.url, "--key", OPERATOR_KEY]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def running(directory: Path, valkey: Valkey, model: Path) -> Iterator[Running]:
    with GatewayProcess(directory, config(valkey, model), ENVIRON) as gateway:
        gateway.until_ready()
        with httpx.Client(base_url=gateway.url, timeout=120, verify=False) as http:
            yield Running(gateway, http, valkey)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("isolation")


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def first(directory: Path, valkey: Valkey, wordy: Path) -> Iterator[Running]:
    """The first life; what the second is to find has been asked for."""
    with running(directory, valkey, wordy) as run:
        assert total(run.ask("acme", "for the second life")) == 0
        for user in ("bc", "stays"):
            assert total(run.ask("a", f"of {user}", user=user)) == 0
        assert total(run.ask_by_the_rules("acme", "Go on.")) == 0
        made = run["acme"].post("/v1/caches", {"name": "manual", "model": "m", **MANUAL})
        assert made.status_code == 201, made.text
        yield run


@pytest.fixture(scope="module")
def second(directory: Path, first: Running, wordy: Path) -> Iterator[Running]:
    """The second life. Just before the first was stopped, a tenant with a running request and one
    user of another were erased."""
    first.ask("gone", "written")
    first.ask("gone", "written")
    body = chat(prose("running to the end"), max_tokens=60, ignore_eos=True)
    with first.http.stream(
        "POST", CHAT, json={**body, "stream": True}, headers=first["gone"].headers
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        first.erase("gone/cache")
        assert "removed" in first.command("erase", "a", "--user", "bc")
        first.gateway.send(signal.SIGTERM)
        assert list(lines)[-2] == "data: [DONE]"
    assert first.gateway.exit_code() == 0
    with running(directory, first.valkey, wordy) as run:
        yield run


def engine_ms(answer: httpx.Response) -> float:
    assert answer.status_code == 200, answer.text
    return float(answer.headers["x-forebay-engine-ms"])


def test_on_the_device_no_tenant_hits_anothers(first: Running) -> None:
    colds = [first.ask("acme", "hot secret", cache_salt=salt) for salt in ("q", "r", "s")]
    assert [total(cold) for cold in colds] == [0] * 3
    repeats = [first.ask("acme", "hot secret", cache_salt="s") for _ in range(2)]
    assert all(cached(repeat)["device"] >= 300 for repeat in repeats)
    others = [
        first.ask("ac", "hot secret", cache_salt="s"),
        first.ask("ac", "hot secret"),
        first.ask("ac", "hot secret", cache_salt="mes", prompt_cache_key="acme", user="acme"),
    ]
    assert [total(other) for other in others] == [0] * 3
    assert {text(other) for other in others} == {text(cold) for cold in colds}
    # nor does time tell: a hit is many times faster than what any of these took
    assert min(map(engine_ms, others)) > 2 * min(map(engine_ms, repeats))
    assert min(map(engine_ms, others)) > min(map(engine_ms, colds)) / 3


def test_in_dram_no_tenant_hits_anothers(first: Running) -> None:
    cold = first.ask("acme", "warm secret")
    first.ask("acme", "warm secret")  # twice, so that it is worth keeping below
    push_out(first["acme"], POOL_TOKENS)
    other = first.ask("ac", "warm secret")
    repeat = first.ask("acme", "warm secret")
    assert total(cold) == 0
    assert total(other) == 0
    assert cached(repeat)["dram"] >= 300
    assert text(other) == text(repeat) == text(cold)


def test_tenant_and_user_do_not_run_together(first: Running) -> None:
    """Tenant "a" with user "bc" is not "ab" with "c", nor "a" with "b" and salt "c"."""

    def ask(tenant: str, **fields: object) -> int:
        return total(first.ask(tenant, "whose", 150, **fields))

    assert ask("a", user="bc") == 0
    assert ask("a", user="bc") >= 128
    assert ask("a", safety_identifier="bc") >= 128
    assert ask("ab", user="c") == 0
    assert ask("a", user="b", cache_salt="c") == 0
    assert ask("a", user="c") == 0
    assert ask("a") == ask("a") == 0  # who names nobody shares with nobody


def test_a_declared_prefix_is_shared_and_nothing_behind_it(first: Running) -> None:
    question = prose("private question", 100)
    first.ask_by_the_rules("acme", "Whatever.")
    own = first.ask_by_the_rules("acme", question)
    own_again = first.ask_by_the_rules("acme", question)
    other = first.ask_by_the_rules("ac", question)
    assert total(own) >= 200
    assert total(own_again) >= total(own) + 96
    assert total(other) == total(own)
    # not only for the one who warmed it, and not for text that is only like it
    assert total(first.ask("ac", RULES, 0)) == 0


def test_what_is_erased_while_requests_run_is_found_by_nobody(first: Running) -> None:
    gone, valkey = first["gone"], first.valkey
    assert total(first.ask("gone", "stored")) == 0
    assert total(first.ask("gone", "stored")) >= 300
    eventually(lambda: len(block_keys(valkey, "gone")) >= 20, 10)
    assert total(first.ask("ac", "of ac", 150)) == 0
    assert total(first.ask("ac", "of ac", 150)) >= 128
    bodies = [
        {**chat(prose(name), max_tokens=40, ignore_eos=True), "stream": True}
        for name in ("decoding", "prefilling")
    ]
    with first.http.stream("POST", CHAT, json=bodies[0], headers=gone.headers) as decoding:
        lines = decoding.iter_lines()
        next(lines)
        with first.http.stream("POST", CHAT, json=bodies[1], headers=gone.headers) as prefilling:
            assert decoding.status_code == prefilling.status_code == 200
            erased = first.erase("gone/cache")
            removed = erased["models"]["m"]
            assert removed["device"] + removed["dram"] > 0 < removed["redis"]
            assert list(prefilling.iter_lines())[-2] == "data: [DONE]"
        assert list(lines)[-2] == "data: [DONE]"
    first.gateway.until_idle()
    assert block_keys(valkey, "gone") == []
    for name in ("stored", "decoding", "prefilling"):
        assert total(first.ask("gone", name)) == 0
    assert total(first.ask("ac", "of ac", 150)) >= 128  # nobody else's went


def test_from_redis_no_tenant_hits_anothers(second: Running) -> None:
    other = second.ask("ac", "for the second life")
    repeat = second.ask("acme", "for the second life")
    assert total(other) == 0
    assert cached(repeat)["redis"] >= 300
    assert text(other) == text(repeat)


def test_from_redis_a_declared_prefix_is_shared(second: Running) -> None:
    assert cached(second.ask_by_the_rules("ab", "Go on.", user="new"))["redis"] >= 200
    assert total(second.ask_by_the_rules("ac", "And on.")) >= 200


def test_a_name_outlives_a_restart_with_what_it_stands_for(second: Running) -> None:
    body = {**chat("In a word?", max_tokens=2), "cached_content": "manual"}
    assert cached(second["acme"].post(CHAT, body))["redis"] >= 200
    assert second["ac"].post(CHAT, body).status_code == 404


def test_after_a_restart_the_erased_is_still_gone(second: Running) -> None:
    assert block_keys(second.valkey, "gone") == []
    for name in ("written", "running to the end"):
        assert total(second.ask("gone", name)) == 0
    assert total(second.ask("a", "of bc", user="bc")) == 0
    assert cached(second.ask("a", "of stays", user="stays"))["redis"] >= 300


def test_a_sealed_redis_shows_no_prompt(second: Running) -> None:
    words = prose("for the second life")
    asked = {"model": "m", "messages": [{"role": "user", "content": words}]}
    ids = np.array(second["acme"].whole("/tokenize", asked)["tokens"])
    keys = block_keys(second.valkey, "acme")
    values = stored_values(second.valkey, keys[:40])
    assert len(values) == 40
    traces = [b"second life", words.encode()[100:120]]
    traces += [ids[at : at + 4].astype("<u4").tobytes() for at in range(64, len(ids) - 4, 16)]
    assert not [trace for trace in traces for value in values if trace in value]


def test_the_command_says_and_removes_what_is_kept(second: Running) -> None:
    asked = second.ask("acme", "for the commands", 150)
    again = second.ask("acme", "for the commands", 150)
    stats = second.command("stats")
    assert all(word in stats for word in ("m (m/0)", "device", "dram", "redis", "acme"))
    tiers = json.loads(second.command("stats", "--json"))["models"]["m"]["replicas"][0]["tiers"]
    assert [tier["tier"] for tier in tiers] == ["device", "dram", "redis"]
    missed = second.command("explain", asked.headers["x-request-id"])
    assert "miss, " in missed
    assert "for the commands" not in missed
    hit = second.command("explain", again.headers["x-request-id"])
    assert f"{total(again)} of " in hit
    assert "hit, was on the device" in hit
    second.command("flush")
    assert block_keys(second.valkey) == []
    assert total(second.ask("acme", "for the commands", 150)) == 0
    assert total(second.ask("acme", "for the commands", 150)) >= 128


def test_a_gateway_with_another_secret_does_not_start(
    tmp_path: Path, second: Running, valkey: Valkey, wordy: Path
) -> None:
    assert second.gateway.process.poll() is None
    environ = ENVIRON | {"FOREBAY_SECRET": OTHER_SECRET}
    with GatewayProcess(tmp_path, config(valkey, wordy), environ) as stranger:
        assert stranger.exit_code() == 2
        [line] = [line for line in stranger.stderr.splitlines() if line.startswith("forebay:")]
    assert "another server secret" in line
    assert "server.secret_env" in line
    assert SECRET not in line
    assert OTHER_SECRET not in line
