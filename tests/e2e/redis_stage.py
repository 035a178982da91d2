"""A gateway whose prompts need all three tiers, a Redis whose faults a test chooses, and traffic
that is checked against cold answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from cache.envelope import KEY_PREFIX
from tests.cache.valkey import Valkey
from tests.e2e.client import ACME_KEY, COMPLETIONS, Client, completion
from tests.e2e.gateway_process import GatewayProcess, Metrics, eventually
from tests.e2e.tiers import device_bytes, dram_bytes, prose

ADMIN_KEY = "the-operators-own-key-of-this-test"
TIMEOUT_S = 0.25
PATIENCE_S = 30.0
CLIENTS = 3
PROMPTS = 6

_CONFIG = """
server: {{port: PORT, admin_key_env: ADMIN_KEY}}
redis: {{url: "unix://{socket}", timeout_ms: {timeout_ms}}}
models:
  - {{name: m, path: "{model}", dtype: float32, max_context: 400, step_tokens: 128,
     cache: {{device: {device}, dram: {dram}}}}}
tenants:
  - {{id: acme, keys: [{{env: ACME_KEY}}]}}
"""


def _prompts() -> list[str]:
    """They share their first blocks and have as many of their own: together more than device and
    DRAM hold."""
    head = prose("everybody", 150)
    return [head + prose(f"visitor {which}", 190) for which in range(PROMPTS)]


def up(metrics: Metrics) -> bool:
    """Whether Redis answers, as far as the gateway can tell."""
    return metrics.total("forebay_cache_tier_up", tier="redis") == 1


def misses(metrics: Metrics, reason: str) -> float:
    """Blocks that Redis did not give."""
    return metrics.total("forebay_cache_misses_total", tier="redis", reason=reason)


def drops(metrics: Metrics, reason: str) -> float:
    """Blocks that Redis, or who writes to it, did not take."""
    return metrics.total("forebay_cache_store_drops_total", tier="redis", reason=reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer, and what the gateway remembers of how it met the cache. `waited_s` is
    its wait for lower tiers, `from_redis` and `cached` are tokens."""

    prompt: int
    asked_s: float
    answered_s: float
    text: str
    logprobs: tuple[float, ...]
    waited_s: float
    cached: int
    from_redis: int


@dataclass
class Traffic:
    """What clients were answered so far."""

    answers: list[Answer] = field(default_factory=list)

    def go_on(self, count: int) -> None:
        """Until so many more requests, begun from now on, have been answered."""
        now = time.monotonic()
        eventually(lambda: len(self.since(now)) >= count, PATIENCE_S)

    def since(self, start_s: float) -> list[Answer]:
        """Answers to what was asked from then on."""
        return [answer for answer in list(self.answers) if start_s <= answer.asked_s]


class RedisStage:
    """`entrance` is the socket that the gateway knows; it leads to Valkey's own, or elsewhere.

    The gateway is started when it is first needed, and again after it was ended.
    """

    def __init__(self, directory: Path, valkey: Valkey, model: Path) -> None:
        self.valkey = valkey
        self.entrance = directory / "redis.sock"
        self.lead_to(valkey.socket_path)
        self._directory = directory
        self._model = model
        self._gateways = itertools.count()
        self._gateway: GatewayProcess | None = None
        self._cold: list[Answer] = []
        self._cold_s = 0.0
        self._prompts = _prompts()

    def lead_to(self, socket_path: Path) -> None:
        """New connections go there."""
        self.entrance.unlink(missing_ok=True)
        self.entrance.symlink_to(socket_path)

    def close(self) -> None:
        """Kill the gateway. Idempotent."""
        if self._gateway is not None:
            self._gateway.__exit__(None, None, None)
            self._gateway = None

    @property
    def runs(self) -> bool:
        """Whether there is a gateway."""
        return self._gateway is not None and self._gateway.process.poll() is None

    @property
    def gateway(self) -> GatewayProcess:
        """Ready."""
        if self._gateway is None or not self.runs:
            config = _CONFIG.format(
                socket=self.entrance,
                timeout_ms=round(TIMEOUT_S * 1e3),
                model=self._model,
                device=device_bytes(544),
                dram=dram_bytes(272),
            )
            directory = self._directory / f"gateway-{next(self._gateways)}"
            environ = {
                "ACME_KEY": ACME_KEY,
                "ADMIN_KEY": ADMIN_KEY,
                "FOREBAY_STATE_DIR": str(self._directory / "state"),
            }
            self._gateway = GatewayProcess(directory, config, environ)
            self._gateway.until_ready()
        return self._gateway

    def ask(self, client: Client, prompt: int, **fields: object) -> Answer:
        """Send one prompt; fails unless the answer is a 200."""
        body = completion(
            self._prompts[prompt], max_tokens=2, logprobs=1, ignore_eos=True, **fields
        )
        asked_s = time.monotonic()
        answer = client.post(COMPLETIONS, body)
        assert answer.status_code == 200, answer.text
        answered_s = time.monotonic()
        choice = answer.json()["choices"][0]
        use = self._use_of(client.http, answer.headers["x-request-id"])
        return Answer(
            prompt=prompt,
            asked_s=asked_s,
            answered_s=answered_s,
            text=choice["text"],
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            waited_s=use["load_ms"] / 1e3,
            cached=answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
            from_redis=use["cached_tokens"]["redis"],
        )

    def cold(self) -> list[Answer]:
        """What each prompt is answered by a model that knows nothing of it."""
        if not self._cold:
            with self._client() as client:
                answers = [
                    self.ask(client, prompt, cache_salt=f"cold {prompt}")
                    for prompt in range(PROMPTS)
                ]
            assert [answer.cached for answer in answers] == [0] * PROMPTS
            self._cold = answers
            self._cold_s = max(answer.answered_s - answer.asked_s for answer in answers)
        return self._cold

    @property
    def longest_wait_s(self) -> float:
        """What a prompt may wait for lower tiers at the very most: once the timeout, or as long as
        computing takes, and then for a step of others to end."""
        return TIMEOUT_S + 2 * self._cold_s + 0.5

    @contextmanager
    def traffic(self) -> Iterator[Traffic]:
        """Clients that ask all the while, one prompt after the other. In the end, no request has
        failed, and every text is the cold one, about as likely: a wrong block shows there first."""
        cold = self.cold()
        traffic, stop, turns = Traffic(), threading.Event(), itertools.count()
        lock = threading.Lock()

        def ask_on() -> None:
            with self._client() as client:
                while not stop.is_set():
                    with lock:
                        prompt = next(turns) % PROMPTS
                    traffic.answers.append(self.ask(client, prompt))

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(ask_on) for _ in range(CLIENTS)]
            try:
                yield traffic
            finally:
                stop.set()
        for client in clients:
            client.result()
        for answer in traffic.answers:
            assert answer.text == cold[answer.prompt].text
            assert answer.logprobs == pytest.approx(cold[answer.prompt].logprobs, abs=1e-4)

    def metrics(self) -> Metrics:
        return self.gateway.metrics()

    def until_hits(self, blocks: int = 5) -> None:
        """Until so many more blocks came from Redis than now."""
        self.until_more("forebay_cache_hits_total", blocks, tier="redis")

    def until_more(self, name: str, by: float, **labels: str) -> None:
        """Until a counter has grown from what it is now."""
        before = self.metrics().total(name, **labels)
        self.until(lambda metrics: metrics.total(name, **labels) >= before + by)

    def until(self, holds: Callable[[Metrics], bool]) -> None:
        """Until the metrics are so. Seldom asked: scraping takes time from the models."""
        eventually(lambda: holds(self.metrics()), PATIENCE_S, every_s=0.1)

    def until_up(self) -> None:
        """Until Redis answers again."""
        self.until(up)

    def blocks(self, connection: redis.Redis) -> list[bytes]:
        """The names of all blocks in Redis."""
        return list(connection.scan_iter(KEY_PREFIX + b"*", count=1000))

    @contextmanager
    def _client(self) -> Iterator[Client]:
        with httpx.Client(base_url=self.gateway.url, timeout=60, verify=False) as http:
            yield Client(http, ACME_KEY)

    def _use_of(self, http: httpx.Client, request_id: str) -> dict[str, Any]:
        """How a request met the cache; known a moment after its answer."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        deadline = time.monotonic() + 10
        while True:
            answer = http.get(f"/admin/requests/{request_id}/cache", headers=headers)
            if answer.status_code == 200:
                [use] = answer.json()["requests"][0]["choices"]
                return dict(use)
            assert answer.status_code == 404, answer.text
            assert time.monotonic() < deadline, "a request is not remembered"
            time.sleep(0.005)
