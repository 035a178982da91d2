"""Gateways with several replicas: streams that run while one is lost, what the operator sees of it,
and the processes behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.client import ACME_KEY, CHAT, COMPLETIONS, Streamed, chat, completion, read_events
from tests.e2e.gateway_process import GatewayProcess, Metrics, eventually
from tests.e2e.tiers import OPERATOR_KEY

STREAMS = 16
BEGUN = 5
"""Pieces of text after which a stream is in its middle."""
PATIENCE_S = 90.0
"""For a process that starts while others do, on a machine that is busy."""


def caller(gateway: GatewayProcess) -> httpx.Client:
    """A client that is made quickly: for plain HTTP there are no certificates to be read."""
    return httpx.Client(base_url=gateway.url, timeout=PATIENCE_S, verify=False)


def story(number: int, tokens: int) -> dict[str, Any]:
    """The body of one of many different streams of so many tokens: most are greedy, some draw under
    a seed, with penalties and with strings to stop at that never come."""
    fields: dict[str, Any] = {
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    if number % 4 == 3:
        fields |= {
            "temperature": 1.0,
            "seed": 1000 + number,
            "frequency_penalty": 0.1,
            "stop": ["a stop that never comes"],
        }
    prompt = f"Story number {number}: once upon a time in a land of many rivers and few bridges"
    if number % 2:
        return chat(prompt, **fields)
    return completion(prompt, **fields)


class Streams:
    """Streams that are read side by side, each by a thread. Make it by `reading`."""

    def __init__(self, gateway: GatewayProcess, key: str, bodies: Sequence[dict[str, Any]]) -> None:
        self.so_far = [Streamed(0, httpx.Headers()) for _ in bodies]
        self._gateway = gateway
        self._key = key
        self._threads = ThreadPoolExecutor(len(bodies))
        self._reads: list[Future[None]] = [
            self._threads.submit(self._read, body, into)
            for body, into in zip(bodies, self.so_far, strict=True)
        ]

    def until_begun(self) -> None:
        """Wait until each is in its middle; none has ended by then."""
        eventually(
            lambda: all(len(each.choices()) >= BEGUN for each in self.so_far),
            PATIENCE_S,
            lambda: str([(each.status, each.events[-1:]) for each in self.so_far]),
            every_s=0.005,
        )
        assert not self.ended

    @property
    def ended(self) -> int:
        """How many are over."""
        return sum(read.done() for read in self._reads)

    def results(self, timeout_s: float = PATIENCE_S) -> list[Streamed]:
        """All of them, read to their end."""
        for read in self._reads:
            read.result(timeout_s)
        return self.so_far

    def close(self) -> None:
        """Wait for the threads."""
        self._threads.shutdown()

    def _read(self, body: dict[str, Any], into: Streamed) -> None:
        path = CHAT if "messages" in body else COMPLETIONS
        headers = {"Authorization": f"Bearer {self._key}"}
        with (
            caller(self._gateway) as http,
            http.stream("POST", path, json=body | {"stream": True}, headers=headers) as answer,
        ):
            into.headers, into.status = answer.headers, answer.status_code
            if answer.status_code != 200:
                into.events.append({"error": answer.read().decode()})
                return
            read_events(answer.iter_lines(), into)


@contextmanager
def reading(
    gateway: GatewayProcess, bodies: Sequence[dict[str, Any]], key: str = ACME_KEY
) -> Iterator[Streams]:
    """All these streams at once."""
    streams = Streams(gateway, key, bodies)
    try:
        yield streams
    finally:
        streams.close()


@dataclass(frozen=True, slots=True)
class Told:
    """What a stream's client was told in the end."""

    text: str
    finish_reasons: list[str]
    prompt_tokens: int
    completion_tokens: int
    model: str


def told(streamed: Streamed) -> Told:
    """Asserts that the answer is whole: no error, one id, one role, usage once, `[DONE]`."""
    assert streamed.status == 200, streamed.events
    errors = [event["error"] for event in streamed.events if "error" in event]
    assert not errors, (errors, streamed.text())
    assert streamed.done
    assert len({event["id"] for event in streamed.events}) == 1
    roles = [choice for choice in streamed.choices() if "role" in choice.get("delta", ())]
    assert len(roles) == (1 if "delta" in streamed.choices()[0] else 0)
    [usage] = [event["usage"] for event in streamed.events if event.get("usage")]
    [model] = {event["model"] for event in streamed.events}
    return Told(
        streamed.text(),
        streamed.finish_reasons(),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        model,
    )


@dataclass(frozen=True, slots=True)
class Counted:
    """What a gateway has counted of one tenant's requests."""

    answered: float
    prompt_tokens: float
    generated_tokens: float
    failovers: float

    @staticmethod
    def at(metrics: Metrics, tenant: str = "acme") -> Counted:
        return Counted(
            metrics.total("forebay_requests_total", tenant=tenant, outcome="success"),
            metrics.total("forebay_prompt_tokens_total", tenant=tenant),
            metrics.total("forebay_generated_tokens_total", tenant=tenant),
            metrics.total("forebay_failovers_total", when="mid_stream"),
        )

    @staticmethod
    def since(before: Counted, gateway: GatewayProcess, answered: int) -> Counted:
        """What has come since, as soon as so many answers have: they are counted a moment after
        their clients have them."""

        def now() -> Counted:
            return Counted.at(gateway.metrics()) - before

        eventually(lambda: now().answered >= answered, 5, lambda: str(now()))
        counted = now()
        assert counted.answered == answered
        return counted

    def __sub__(self, other: Counted) -> Counted:
        return Counted(
            self.answered - other.answered,
            self.prompt_tokens - other.prompt_tokens,
            self.generated_tokens - other.generated_tokens,
            self.failovers - other.failovers,
        )


@dataclass
class Operator:
    """A gateway as its operator sees and changes it."""

    gateway: GatewayProcess
    _headers: dict[str, str] = field(
        default_factory=lambda: {"Authorization": f"Bearer {OPERATOR_KEY}"}
    )

    def ask(self, method: str, path: str, body: object = None, status: int = 200) -> dict[str, Any]:
        """The JSON of an answer, which must have this status."""
        with caller(self.gateway) as http:
            answer = http.request(method, f"/admin{path}", json=body, headers=self._headers)
        assert answer.status_code == status, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Every replica's state, by name."""
        return {each["replica"]: each for each in self.ask("GET", "/replicas")["replicas"]}

    def conditions(self) -> dict[str, str]:
        """Every replica's condition, by name."""
        return {name: each["condition"] for name, each in self.replicas().items()}

    def until_serving(self, count: int) -> None:
        """Wait until there are so many replicas and all of them serve."""
        eventually(
            lambda: list(self.conditions().values()) == ["serving"] * count,
            PATIENCE_S,
            lambda: str(self.conditions()) + self.gateway.output[-3000:],
            every_s=0.05,
        )

    def lost(self) -> str | None:
        """The one replica that does not serve, None as long as all do."""
        away = [name for name, each in self.replicas().items() if each["condition"] != "serving"]
        assert len(away) <= 1
        return away[0] if away else None

    def explain(self, body: dict[str, Any], tenant: str = "acme") -> dict[str, Any]:
        """Where a request would go."""
        [decision] = self.ask("POST", "/route/explain", body | {"tenant": tenant})["decisions"]
        return dict(decision)

    def warm(self, body: dict[str, Any], tenant: str = "acme") -> dict[str, bool]:
        """Whether each replica that may take it is believed to hold some of it."""
        candidates = self.explain(body, tenant)["candidates"]
        return {each["replica"]: any(each["cached_tokens"].values()) for each in candidates}

    @contextmanager
    def drained(self, replica: str) -> Iterator[None]:
        """Nothing is sent there while the scope lasts."""
        drained = self.ask("POST", f"/replicas/{replica}/drain")
        assert (drained["condition"], drained["takes_requests"]) == ("draining", False)
        try:
            yield
        finally:
            resumed = self.ask("POST", f"/replicas/{replica}/resume")
        assert resumed["takes_requests"]

    def decisions(self, streamed: Streamed) -> list[dict[str, Any]]:
        """Every decision about a stream that is over, remembered a moment after its end."""
        path = f"/requests/{streamed.headers['x-request-id']}"
        with caller(self.gateway) as http:
            known = partial(http.get, f"/admin{path}", headers=self._headers)
            eventually(lambda: known().is_success, 5)
        [request] = self.ask("GET", path)["requests"]
        by_choice = [decision for choice in request["choices"] for decision in choice["decisions"]]
        return by_choice + request["decisions"]

    def until_nothing_is_left(self) -> None:
        """Wait until no request, sequence, page or token is counted anywhere."""
        self.gateway.until_idle(10)
        for each in self.replicas().values():
            own = each["own_load"]
            assert own == dict.fromkeys(own, 0), each
        metrics = self.gateway.metrics()
        assert metrics.total("forebay_replica_sequences") == 0
        assert metrics.total("forebay_replica_pending_tokens") == 0


def worker_pids(gateway: GatewayProcess) -> list[int]:
    """The processes of a gateway's workers, the oldest first."""
    pid = gateway.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if "gateway.replicas.worker" in _command(int(child))]


def exists(pid: int) -> bool:
    """Whether a process runs, or waits to be buried."""
    return Path(f"/proc/{pid}").exists()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
