"""What the gateway costs as a proxy: requests to a stub that answers at once, direct and proxied.

Everything that a request to a remote model meets is on: authentication, the tenant's limit, hashing
of the prompt, routing, metrics and the log. Direct and proxied rounds alternate, so that what slows
the machine for a while slows both.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from statistics import median

import orjson

from loadtest.bench.campaign import CampaignError, Tell
from loadtest.bench.closed_loop import exchange_all
from loadtest.bench.completion import refusal
from loadtest.forebay_server import KEY_VARIABLE, RunningServer, running_forebay
from loadtest.process_tree import cpu_seconds
from loadtest.server_process import running_module
from loadtest.stats.distribution import Distribution
from loadtest.stub_server import WORD
from loadtest.target import Target
from loadtest.wire.connection import Answer, Endpoint, ExchangeError, fetch

MODEL = "stub"
_START_S = 20.0
_TIMEOUT_S = 20.0
_PROMPT_BYTES = 450
_IN_A_ROW = 24
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ProxyCase:
    """One kind of answer: whole, or a stream of so many events, each a write of the stub's."""

    name: str
    stream: bool
    tokens: int


WHOLE = ProxyCase("JSON", False, 16)
ONE_EVENT = ProxyCase("SSE, 1 event", True, 1)
SIXTEEN_EVENTS = ProxyCase("SSE, 16 events", True, 16)
CASES = (WHOLE, ONE_EVENT, SIXTEEN_EVENTS)


@dataclass(frozen=True, slots=True)
class ProxyPlan:
    """So many pairs of rounds, each of so many requests, for each case: one at a time, and `crowd`
    at a time. `warm_up` requests come first that do not count."""

    rounds: int = 6
    alone_requests: int = 150
    crowd_requests: int = 1280
    crowd: int = 32
    warm_up: int = 300


@dataclass(frozen=True, slots=True)
class ProxyFigure:
    """One case at one concurrency. Times are from sending a request to the end of its answer.

    `added_p50_ms` is the median over pairs of rounds, `added_p99_ms` between all requests of either
    kind. `cpu_s` is what the gateway's processes took per 1,000 requests; None where the kernel
    does not tell.
    """

    case: str
    gateway: str
    concurrency: int
    direct_ms: Distribution
    proxied_ms: Distribution
    added_p50_ms: float
    direct_per_s: float
    proxied_per_s: float
    cpu_s: float | None

    @property
    def added_p99_ms(self) -> float:
        """By how much the slowest hundredth is slower."""
        return self.proxied_ms.p99 - self.direct_ms.p99


async def measure_proxy(tell: Tell, plan: ProxyPlan | None = None) -> list[ProxyFigure]:
    """Every case through one gateway process, and the last one also through two that share a port.
    Raises CampaignError."""
    plan = plan or ProxyPlan()
    figures: list[ProxyFigure] = []
    async with running_stub() as stub:
        tell("a gateway in front of a stub")
        async with running_forebay(config=proxy_config([stub])) as server:
            pair = _Pair(stub, server, "1 process")
            await pair.warm_up(plan)
            for case in CASES:
                tell(f"{case.name}, direct and proxied in turn")
                for concurrency, requests in (
                    (1, plan.alone_requests),
                    (plan.crowd, plan.crowd_requests),
                ):
                    figures.append(await pair.measure(case, concurrency, plan.rounds, requests))
        if sys.platform == "linux":
            tell("two gateway processes on one port")
            flags = ("--workers", "2")
            async with running_forebay(config=proxy_config([stub]), flags=flags) as server:
                await _until_all_are_ready(server.endpoint)
                pair = _Pair(stub, server, "2 processes")
                await pair.warm_up(plan)
                figures.append(
                    await pair.measure(SIXTEEN_EVENTS, plan.crowd, plan.rounds, plan.crowd_requests)
                )
    return figures


def running_stub() -> AbstractAsyncContextManager[Endpoint]:
    """A stub in a process of its own, killed at the end of the scope. Raises CampaignError."""
    return running_module("loadtest.stub_server", "the stub")


def proxy_config(upstreams: Sequence[Endpoint]) -> str:
    """A gateway's configuration with one remote model and a tenant with a limit."""
    remotes = "".join(
        f"      - {{url: 'http://{at.host}:{at.port}{at.base_path}', engine: openai, "
        "shared_cache: accept, max_running: 256}\n"
        for at in upstreams
    )
    return (
        f"models:\n  - name: {MODEL}\n    remote:\n{remotes}"
        "redis: {url: 'off'}\n"
        "tenants:\n"
        f"  - {{id: loadtest, keys: [{{env: {KEY_VARIABLE}}}], limits: {{concurrency: 1000}}}}\n"
    )


def chat_body(case: ProxyCase) -> bytes:
    """The JSON of one chat request, 0.6 KB of it."""
    filler = "What stands in front of an engine should cost nothing that anybody sees. "
    text = (filler * (_PROMPT_BYTES // len(filler) + 1))[:_PROMPT_BYTES]
    return orjson.dumps(
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "You are a stub."},
                {"role": "user", "content": text},
            ],
            "max_tokens": case.tokens,
            "temperature": 0,
            "stream": case.stream,
        }
    )


def complaint(answer: Answer | str, case: ProxyCase) -> str | None:
    """Why an answer is not what the stub says; None if it is."""
    if isinstance(answer, str):
        return answer
    if answer.status != 200:
        return refusal(answer)
    body = answer.body
    if not answer.whole or body.count(WORD.encode()) != case.tokens:
        return "an answer is not whole"
    if case.stream and not body.endswith(b"data: [DONE]\n\n"):
        return "a stream has no end"
    return None


async def _until_all_are_ready(endpoint: Endpoint) -> None:
    """Wait until so many connections in a row, which the kernel deals out between the processes,
    find a gateway that serves. Raises CampaignError."""
    in_a_row, deadline_s = 0, time.monotonic() + _START_S
    while in_a_row < _IN_A_ROW:
        if time.monotonic() > deadline_s:
            raise CampaignError(f"not every gateway process was ready within {_START_S:g} s")
        try:
            ready = (await fetch(endpoint, "GET", "/health/ready")).status == 200
        except ExchangeError:
            ready = False
        in_a_row = in_a_row + 1 if ready else 0
        if not ready:
            await asyncio.sleep(_POLL_S)


class _Pair:
    """The stub, and a gateway in front of it."""

    def __init__(self, stub: Endpoint, server: RunningServer, name: str) -> None:
        self._direct = Target("stub", stub, MODEL, timeout_s=_TIMEOUT_S)
        self._proxied = Target("forebay", server.endpoint, MODEL, timeout_s=_TIMEOUT_S)
        self._pid = server.pid
        self._name = name

    async def warm_up(self, plan: ProxyPlan) -> None:
        """First requests open connections and fill caches."""
        for target in (self._direct, self._proxied):
            await run_round(target, SIXTEEN_EVENTS, plan.crowd, plan.warm_up)

    async def measure(
        self, case: ProxyCase, concurrency: int, rounds: int, requests: int
    ) -> ProxyFigure:
        """`rounds` pairs of `requests` each. Raises CampaignError for an answer that is none."""
        direct: list[Round] = []
        proxied: list[Round] = []
        cpu_s = 0.0
        cpu_known = True
        for turn in range(rounds):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                if which == 0:
                    direct.append(await run_round(self._direct, case, concurrency, requests))
                    continue
                before_s = cpu_seconds(self._pid)
                proxied.append(await run_round(self._proxied, case, concurrency, requests))
                after_s = cpu_seconds(self._pid)
                if before_s is None or after_s is None:
                    cpu_known = False
                else:
                    cpu_s += after_s - before_s
        return ProxyFigure(
            case=case.name,
            gateway=self._name,
            concurrency=concurrency,
            direct_ms=_all_of(direct),
            proxied_ms=_all_of(proxied),
            added_p50_ms=median(
                median(through.taken_ms) - median(straight.taken_ms)
                for through, straight in zip(proxied, direct, strict=True)
            ),
            direct_per_s=median(one.per_s for one in direct),
            proxied_per_s=median(one.per_s for one in proxied),
            cpu_s=cpu_s * 1000 / (rounds * requests) if cpu_known else None,
        )


@dataclass(frozen=True, slots=True)
class Round:
    """How long each request took, and how many were answered in a second."""

    taken_ms: tuple[float, ...]
    per_s: float


async def run_round(target: Target, case: ProxyCase, concurrency: int, count: int) -> Round:
    """`count` requests of a case, so many at once. Raises CampaignError for an answer that is not
    the stub's."""
    request = target.endpoint.request(
        "POST", f"{target.endpoint.base_path}/chat/completions", chat_body(case)
    )
    began_s = time.perf_counter()
    answers = await exchange_all(target, [request] * count, concurrency)
    wall_s = time.perf_counter() - began_s
    taken_ms = []
    for answer in answers:
        if (why := complaint(answer, case)) is not None or isinstance(answer, str):
            raise CampaignError(f"{target.name}: {why}")
        taken_ms.append((answer.ended_at_s - answer.sent_at_s) * 1e3)
    return Round(tuple(taken_ms), count / wall_s)


def _all_of(rounds: Sequence[Round]) -> Distribution:
    found = Distribution.of(one for each in rounds for one in each.taken_ms)
    if found is None:
        raise AssertionError("every round has requests")
    return found
