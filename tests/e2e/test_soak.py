"""Two tenants, two models, 32 streams at once, a third of them cut off: nobody gets foreign text
and nothing is left behind.

FOREBAY_SOAK_S is how long, five seconds if it is not set.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.e2e.client import (
    AC_KEY,
    ACME_KEY,
    COMPLETIONS,
    Client,
    Streamed,
    completion,
    read_events,
)
from tests.e2e.gateway_process import GatewayProcess, Metrics

SOAK_S = float(os.environ.get("FOREBAY_SOAK_S", "5"))
STREAMS = 32
ABORTED = 0.3
TOKENS = {"m": 12, "tiny": 64}
OPENINGS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Dear hiring manager,\n\nI am writing to",
    "A long prefix that several of these prompts share, so that pages are shared too: one",
    "A long prefix that several of these prompts share, so that pages are shared too: two",
)


@dataclass
class Outcomes:
    """What the streams saw."""

    foreign: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Ask:
    """A request, and the answer that it gets when nobody else is there."""

    key: str
    body: dict[str, object]
    alone: str


def asks(url: str) -> list[Ask]:
    """Half of the prompts are both tenants', half have the tenant's own name in front."""
    found: list[Ask] = []
    with httpx.Client(base_url=url, timeout=120, verify=False) as http:

        def alone(prompt: str, model: str) -> tuple[dict[str, object], str]:
            body = completion(prompt, model, max_tokens=TOKENS[model], ignore_eos=True)
            salted = body | {"cache_salt": f"alone: {prompt}"}
            answer = Client(http, ACME_KEY).whole(COMPLETIONS, salted)
            return body, answer["choices"][0]["text"]

        for model in TOKENS:
            for opening in OPENINGS:
                shared = alone(opening, model)
                for tenant, key in (("acme", ACME_KEY), ("ac", AC_KEY)):
                    own = alone(f"{tenant}: {opening}", model)
                    found += [Ask(key, *shared), Ask(key, *own)]
    return found


def test_soak(gateway: GatewayProcess) -> None:
    all_asks = asks(gateway.url)
    assert len({ask.alone for ask in all_asks}) > len(all_asks) / 2  # the texts tell them apart
    gateway.until_idle()
    before = gateway.metrics()
    pools = {model: pool_pages(before, model) for model in TOKENS}
    outcomes = asyncio.run(soak(gateway.url, all_asks, pools))
    gateway.until_idle()
    after = gateway.metrics()

    assert outcomes.foreign == []
    assert outcomes.refused == []
    assert outcomes.ends["whole"] > STREAMS
    assert outcomes.ends["cut"] > 0
    assert {model: pool_pages(after, model) for model in TOKENS} == pools
    answered = {
        outcome: after.total("forebay_requests_total", outcome=outcome)
        - before.total("forebay_requests_total", outcome=outcome)
        for outcome in ("success", "cancelled", "error", "unavailable", "refused")
    }
    assert answered["error"] == answered["unavailable"] == answered["refused"] == 0
    # what was cut off after its last token had been sent is a success
    assert answered["success"] >= outcomes.ends["whole"]
    assert sum(answered.values()) == outcomes.ends.total()
    sys.stdout.write(f"\n{outcomes.ends} in {SOAK_S:.0f} s\n")


def pool_pages(metrics: Metrics, model: str) -> float:
    """Every page of the model's pool, whatever its state."""
    return metrics.total("forebay_pages", model=model)


async def soak(url: str, all_asks: list[Ask], pools: dict[str, float]) -> Outcomes:
    """`pools` says how many pages each model has."""
    outcomes = Outcomes()
    until = time.monotonic() + SOAK_S
    limits = httpx.Limits(max_connections=STREAMS + 1, keepalive_expiry=1)
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http,
        asyncio.TaskGroup() as group,
    ):
        for seed in range(STREAMS):
            group.create_task(one_client(http, all_asks, random.Random(seed), until, outcomes))
        group.create_task(stay_alive(http, pools, until))
    return outcomes


async def one_client(
    http: httpx.AsyncClient,
    all_asks: list[Ask],
    rng: random.Random,
    until: float,
    outcomes: Outcomes,
) -> None:
    """One stream after the other; some are left in the middle, some before the first token."""
    while time.monotonic() < until:
        ask = rng.choice(all_asks)
        leave_after = rng.randrange(0, 8) if rng.random() < ABORTED else None
        headers = {"Authorization": f"Bearer {ask.key}"}
        request = http.build_request(
            "POST", COMPLETIONS, json=ask.body | {"stream": True}, headers=headers
        )
        answer = await http.send(request, stream=True)
        try:
            if answer.status_code != 200:
                outcomes.refused.append(answer.status_code)
                return
            lines: list[str] = []
            async for line in answer.aiter_lines():
                if leave_after is not None and len(lines) > leave_after:
                    break
                lines.append(line)
        finally:
            await answer.aclose()
        streamed = Streamed(200, answer.headers)
        read_events(iter(lines), streamed)
        outcomes.ends["whole" if streamed.done else "cut"] += 1
        text, prompt = streamed.text(), ask.body["prompt"]
        if not (text == ask.alone if streamed.done else ask.alone.startswith(text)):
            outcomes.foreign.append(f"{prompt!r}: {text!r}, not {ask.alone!r}")
        if not streamed.done and leave_after is None:
            outcomes.foreign.append(f"{prompt!r}: broke off: {streamed.events[-1:]}")


async def stay_alive(http: httpx.AsyncClient, pools: dict[str, float], until: float) -> None:
    """Under all this load liveness is answered and the pool's books add up."""
    while time.monotonic() < until:
        asked = time.monotonic()
        assert (await http.get("/health/live")).status_code == 200
        assert time.monotonic() - asked < 5
        metrics = Metrics((await http.get("/metrics")).text)
        for model, pages in pools.items():
            held = metrics.total("forebay_pages", model=model, state="held")
            assert 0 <= held < pages  # below zero: a page was given back twice
        await asyncio.sleep(0.2)
