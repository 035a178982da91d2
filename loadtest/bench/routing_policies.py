"""What routing by predicted TTFT brings: two workers, and more prefixes than either has room for.

One server, whose policy is changed by reloading, with its caches emptied before each. Every policy
gets the same prompts at the same times; before they count, every prefix has been asked for, so that
what is measured is how a fleet runs and not how it warms up.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from loadtest.bench.campaign import CampaignError, Tell, warm_up
from loadtest.bench.closed_loop import exchange_all
from loadtest.bench.completion import Completion, completion_body, read_stream, refusal
from loadtest.bench.open_loop import arrival_times_s, exchange_at
from loadtest.forebay_server import KEY_VARIABLE, MODEL, RunningServer, running_forebay
from loadtest.stats.distribution import Distribution
from loadtest.target import Target
from loadtest.wire.connection import Answer, ExchangeError, connect, fetch

OURS = "predicted-ttft"
POLICIES = (OURS, "round-robin", "random")
REPLICA_HEADER = "x-forebay-replica"

_SHARED_TOKENS = 1024
_OWN_TOKENS = 64
_OUTPUT_TOKENS = 32
_WARM_CLIENTS = 4
_ADMIN_VARIABLE = "FOREBAY_ADMIN_KEY"
_CACHE_MIB = 160
"""Of the bundled model's KV in bfloat16 that is 7,281 tokens: six prefixes, half of twelve, and
room for the own tokens of eleven running requests."""
_RELOAD_S = 10.0
_POLL_S = 0.05
_RELOADS = re.compile(r'^forebay_config_reloads_total{result="success"} (\S+)', re.M)


@dataclass(frozen=True, slots=True)
class PolicyLoad:
    """`requests` with one of `prefixes` each, drawn at random. `per_s` is the rate at which they
    come, None: `clients` send them in a closed loop. With one prefix nothing is asked before they
    count: how it spreads is what is to be seen."""

    name: str
    requests: int
    prefixes: int
    clients: int = 0
    per_s: float | None = None


LOADS = (
    PolicyLoad("low", 30, 12, per_s=1.0),
    PolicyLoad("high", 80, 12, clients=16),
    PolicyLoad("one prefix", 48, 1, clients=16),
)


@dataclass(frozen=True, slots=True)
class PolicyFigure:
    """One policy under one load. `hit_rate` is cached over all prompt tokens, `ideal_hit_rate` what
    it would be if every request found its prefix; `shares` says which part of the requests each
    replica got, the busiest first."""

    policy: str
    load: str
    ttft_ms: Distribution
    hit_rate: float
    ideal_hit_rate: float
    output_tokens_per_s: float
    shares: tuple[float, ...]


async def measure_policies(
    seed: int, tell: Tell, loads: Sequence[PolicyLoad] = LOADS
) -> list[PolicyFigure]:
    """Every load under every policy. Raises CampaignError, also for a request that fails."""
    figures = []
    tell("starting forebay with two workers")
    async with _two_workers() as bench:
        await warm_up(bench.target, seed)
        for load in loads:
            for policy in POLICIES:
                tell(f"{load.name}: {policy}")
                await bench.use(policy)
                figures.append(await bench.measure(load, policy, seed))
    return figures


@dataclass(frozen=True, slots=True)
class PolicyPrompts:
    """What is sent before a load counts, what counts, and when (None: in a closed loop)."""

    before: tuple[tuple[int, ...], ...]
    counted: tuple[tuple[int, ...], ...]
    at_s: tuple[float, ...] | None


def policy_prompts(load: PolicyLoad, target: Target, seed: int) -> PolicyPrompts:
    """The same for every policy."""
    draw = random.Random(f"policies/{load.name}/{seed}")
    vocabulary = range(*target.vocabulary)

    def some(count: int) -> tuple[int, ...]:
        return tuple(draw.choices(vocabulary, k=count))

    prefixes = [some(_SHARED_TOKENS) for _ in range(load.prefixes)]
    before: list[tuple[int, ...]] = []
    if load.prefixes > 1:
        lap = draw.sample(prefixes, k=len(prefixes)) + draw.choices(prefixes, k=len(prefixes))
        before = [prefix + some(_OWN_TOKENS) for prefix in lap]
    counted = [draw.choice(prefixes) + some(_OWN_TOKENS) for _ in range(load.requests)]
    at_s = None if load.per_s is None else arrival_times_s(draw, load.requests, load.per_s)
    return PolicyPrompts(tuple(before), tuple(counted), None if at_s is None else tuple(at_s))


def sum_up_policy(
    policy: str, load: PolicyLoad, answers: Sequence[Answer], completions: Sequence[Completion]
) -> PolicyFigure:
    """The figure of one run."""
    ttft_ms = Distribution.of(one.ttft_s * 1e3 for one in completions)
    if ttft_ms is None:
        raise ValueError("there are no requests")
    prompt_tokens = sum(one.prompt_tokens for one in completions)
    wall_s = max(one.ended_at_s for one in answers) - min(one.sent_at_s for one in answers)
    replicas = Counter(one.headers.get(REPLICA_HEADER, "") for one in answers)
    cold = len(completions) if load.prefixes > 1 else len(completions) - 1
    return PolicyFigure(
        policy=policy,
        load=load.name,
        ttft_ms=ttft_ms,
        hit_rate=sum(one.cached_tokens or 0 for one in completions) / prompt_tokens,
        ideal_hit_rate=_SHARED_TOKENS * cold / prompt_tokens,
        output_tokens_per_s=sum(one.output_tokens for one in completions) / wall_s,
        shares=tuple(count / len(answers) for _, count in replicas.most_common()),
    )


class _Bench:
    """The server, its operator's key, and its configuration but for the policy."""

    def __init__(self, server: RunningServer, admin_key: str) -> None:
        self.target = Target("forebay", server.endpoint, MODEL)
        self._server = server
        self._operator = replace(server.endpoint, key=admin_key)

    async def use(self, policy: str) -> None:
        """Empty the caches and route by this policy. Raises CampaignError."""
        await self._call("POST", "/admin/cache/flush")
        before = await self._reloads()
        self._server.config.write_text(policy_config(policy))
        os.kill(self._server.pid, signal.SIGHUP)
        deadline_s = time.monotonic() + _RELOAD_S
        while await self._reloads() <= before:
            if time.monotonic() > deadline_s:
                raise CampaignError(f"forebay: {policy} was not in use within {_RELOAD_S:g} s")
            await asyncio.sleep(_POLL_S)

    async def measure(self, load: PolicyLoad, policy: str, seed: int) -> PolicyFigure:
        """Send what comes before, then what counts."""
        prompts = policy_prompts(load, self.target, seed)
        await self._send(prompts.before, _WARM_CLIENTS, None)
        answers, completions = await self._send(prompts.counted, load.clients, prompts.at_s)
        return sum_up_policy(policy, load, answers, completions)

    async def _send(
        self, prompts: Sequence[tuple[int, ...]], clients: int, at_s: Sequence[float] | None
    ) -> tuple[list[Answer], list[Completion]]:
        requests = [
            self.target.endpoint.request(
                "POST",
                self.target.completions_path,
                completion_body(self.target.model, prompt, _OUTPUT_TOKENS),
            )
            for prompt in prompts
        ]
        if at_s is None:
            found = await exchange_all(self.target, requests, clients)
        else:
            found = await exchange_at(self.target, requests, at_s)
        answers, completions = [], []
        for answer in found:
            if isinstance(answer, str):
                raise CampaignError(f"forebay: {answer}")
            read = read_stream(
                answer,
                pass_name="",
                prompt_tokens=_SHARED_TOKENS + _OWN_TOKENS,
                output_tokens=_OUTPUT_TOKENS,
            )
            if not isinstance(read, Completion):
                raise CampaignError(f"forebay: {read.reason}")
            answers.append(answer)
            completions.append(read)
        return answers, completions

    async def _reloads(self) -> float:
        try:
            page = (await fetch(self._server.endpoint, "GET", "/metrics")).body.decode()
        except ExchangeError as error:
            raise CampaignError(f"/metrics: {error}") from None
        found = _RELOADS.search(page)
        return 0.0 if found is None else float(found[1])

    async def _call(self, method: str, path: str) -> None:
        try:
            async with connect(self._operator) as connection:
                request = self._operator.request(method, path)
                answer = await connection.exchange(request, self.target.timeout_s)
        except ExchangeError as error:
            raise CampaignError(f"{path}: {error}") from None
        if answer.status != 200:
            raise CampaignError(f"{path}: {refusal(answer)}")


def policy_config(policy: str) -> str:
    """A gateway with two workers, whose caches hold half of the prefixes each and nothing else."""
    return (
        "models:\n"
        f"  - name: {MODEL}\n"
        "    path: bundled\n"
        "    dtype: bfloat16\n"
        "    replicas: {kind: process, count: 2}\n"
        f"    cache: {{device: {_CACHE_MIB}MiB, dram: 0, redis: false}}\n"
        "redis: {url: 'off'}\n"
        f"routing: {{policy: {policy}}}\n"
        f"tenants:\n  - {{id: loadtest, keys: [{{env: {KEY_VARIABLE}}}]}}\n"
    )


@asynccontextmanager
async def _two_workers() -> AsyncIterator[_Bench]:
    admin_key = secrets.token_urlsafe(32)
    settings: Mapping[str, str] = {_ADMIN_VARIABLE: admin_key}
    async with running_forebay(settings, config=policy_config(OURS)) as server:
        yield _Bench(server, admin_key)
