"""A long run of prompts that never come again, many of them cut off: does anything pile up?

Between equal stretches of load the server gets idle, and then is looked at: its books, its memory,
and a few probes, each a fresh prompt asked twice in a row, whose second answer must come from the
cache as fast as at the beginning.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from loadtest.bench.campaign import CampaignError, Tell
from loadtest.bench.completion import Completion, Failure, completion_body, read_stream, refusal
from loadtest.forebay_server import MODEL, RunningServer, running_forebay
from loadtest.process_tree import descendants_rss_bytes, rss_bytes
from loadtest.target import Target
from loadtest.vocabulary import Vocabulary
from loadtest.wire.connection import Connection, ExchangeError, connect, fetch

BUDGETS_BYTES = {"device": 4 << 20, "dram": 8 << 20}
"""Small, so that a tiny model's blocks fill and leave every tier many times over."""
_REDIS_BYTES = 32 << 20
_REDIS_RSS_BYTES = 96 << 20
"""What the embedded server may take for that: its program, buffers, and holes in its memory. What
forebay itself says of Redis is a count from time to time, which does not know what Redis evicts."""
_SETTINGS = {
    "FOREBAY_MODELS__0__MAX_CONTEXT": "128",
    "FOREBAY_MODELS__0__CACHE__DEVICE": "4MiB",
    "FOREBAY_MODELS__0__CACHE__DRAM": "8MiB",
    "FOREBAY_REDIS__URL": "embedded",
    "FOREBAY_REDIS__MEMORY": str(_REDIS_BYTES),
}
_CLIENTS = 16
_PROMPT_TOKENS = (16, 96)
_OUTPUT_TOKENS = 4
_ABORTED_SHARE = 0.35
"""Some of them are answered before their client leaves, so that about 30 % are cut off."""
_RECENT = 64
_KEPT_SHARE = 0.05
"""So many are kept durably, which sends them to Redis whether or not that is worth it."""
_PROBES = 24
_PROBE_TOKENS = 97
_STRETCHES = 20
_IDLE_S = 15.0
_TIMEOUT_S = 60.0
_POLL_S = 0.05

_SAMPLE = re.compile(r"^(\w+)(?:{(.*)})? (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The idle server after `prompts` prompts. Blocks are by tier and state, bytes by tier.
    `redis_rss_bytes` is the embedded Redis, and `rss_bytes` the server without it; None where the
    kernel does not tell."""

    prompts: int
    blocks: Mapping[str, Mapping[str, int]]
    used_bytes: Mapping[str, int]
    rss_bytes: int | None
    redis_rss_bytes: int | None
    probe_hit_rate: float
    probe_ttft_ms: float


@dataclass(frozen=True, slots=True)
class SoakReport:
    """What a soak saw: how requests ended, and the server between the stretches."""

    ends: Mapping[str, int]
    failures: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]


@dataclass(slots=True)
class _Ends:
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    recent_s: deque[float] = field(default_factory=lambda: deque([0.02], maxlen=_RECENT))
    """How long whole answers took, for clients to leave in their middle."""


async def run_soak(
    model: Path, *, prompts: int, seed: int, vocabulary: Vocabulary, tell: Tell
) -> SoakReport:
    """Start forebay with the checkpoint at `model`, send `prompts` prompts, look, stop it.

    Raises CampaignError if it does not start, or does not get idle between two stretches.
    """
    settings = {**_SETTINGS, "FOREBAY_MODELS__0__PATH": str(model)}
    async with running_forebay(settings) as server:
        return await soak(server, prompts=prompts, seed=seed, vocabulary=vocabulary, tell=tell)


async def soak(
    server: RunningServer, *, prompts: int, seed: int, vocabulary: Vocabulary, tell: Tell
) -> SoakReport:
    """The same with a server that runs already."""
    target = Target("forebay", server.endpoint, MODEL, vocabulary, _TIMEOUT_S)
    draw = random.Random(f"soak/{seed}")
    ends = _Ends()
    checkpoints: list[Checkpoint] = []
    sent = 0
    for stretch in range(1, _STRETCHES + 1):
        upto = prompts * stretch // _STRETCHES
        await _load(target, draw, upto - sent, ends)
        sent = upto
        checkpoint = await _look(target, draw, sent, server.pid)
        checkpoints.append(checkpoint)
        tell(
            f"{sent:,} prompts: {dict(ends.counts)}, hit {checkpoint.probe_hit_rate:.0%} in "
            f"{checkpoint.probe_ttft_ms:.1f} ms, RSS {(checkpoint.rss_bytes or 0) / 1e6:.0f} MB"
        )
    return SoakReport(dict(ends.counts), tuple(ends.failures), tuple(checkpoints))


def complaints(report: SoakReport, budgets_bytes: Mapping[str, int] = BUDGETS_BYTES) -> list[str]:
    """One line for each thing that is not as it should be; none if the soak is passed."""
    lines = (
        [f"{len(report.failures)} requests failed: {report.failures[0]}"] if report.failures else []
    )
    for one in report.checkpoints:
        at = f"after {one.prompts:,} prompts"
        for tier, states in one.blocks.items():
            if states.get("held"):
                lines.append(f"{at}: {states['held']} {tier} blocks are held, and nothing runs")
        for tier, budget in budgets_bytes.items():
            if one.used_bytes.get(tier, 0) > budget:
                lines.append(f"{at}: {tier} holds {one.used_bytes[tier]:,} of {budget:,} bytes")
        if (one.redis_rss_bytes or 0) > _REDIS_RSS_BYTES:
            lines.append(f"{at}: the embedded Redis takes {one.redis_rss_bytes:,} bytes")
    totals = [
        {tier: sum(n.values()) for tier, n in one.blocks.items()} for one in report.checkpoints
    ]
    if any(total != totals[0] for total in totals):
        lines.append(f"the number of blocks changed: {totals[0]} at first, {totals[-1]} at last")
    return lines + _drifts(report.checkpoints)


def _drifts(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """What differs between an early and the last third; the first third fills the tiers."""
    third = len(checkpoints) // 3
    early, late = checkpoints[third : 2 * third], checkpoints[-third:]
    if not early or not late:
        return ["too few stretches to tell whether anything drifts"]
    lines = []
    rates = [median(one.probe_hit_rate for one in part) for part in (early, late)]
    if rates[1] < 0.98 * rates[0] or rates[0] < 0.9:
        lines.append(f"probe hit rate: {rates[0]:.1%} before, {rates[1]:.1%} at last")
    ttfts = [median(one.probe_ttft_ms for one in part) for part in (early, late)]
    if ttfts[1] > 1.5 * ttfts[0] + 2:
        lines.append(f"TTFT of probes: {ttfts[0]:.1f} ms before, {ttfts[1]:.1f} ms at last")
    sizes = [[one.rss_bytes for one in part if one.rss_bytes is not None] for part in (early, late)]
    if all(sizes):
        before, after = (median(part) for part in sizes)
        if after > 1.03 * before + (4 << 20):
            lines.append(f"RSS: {before / 1e6:.0f} MB before, {after / 1e6:.0f} MB at last")
    return lines


async def _load(target: Target, draw: random.Random, prompts: int, ends: _Ends) -> None:
    """One stretch, by clients that each take the next prompt when their last is over."""
    left = iter(range(prompts))

    async def client() -> None:
        async with connect(target.endpoint) as connection:
            for _ in left:
                await _one(target, connection, draw, ends)

    async with asyncio.TaskGroup() as clients:
        for _ in range(_CLIENTS):
            clients.create_task(client())


async def _one(target: Target, connection: Connection, draw: random.Random, ends: _Ends) -> None:
    prompt = _prompt(target, draw, draw.randint(*_PROMPT_TOKENS))
    kept = {"prompt_cache_retention": "24h"} if draw.random() < _KEPT_SHARE else {}
    aborts = draw.random() < _ABORTED_SHARE
    limit_s = draw.random() * median(ends.recent_s) if aborts else target.timeout_s
    answer = await _complete(target, connection, prompt, limit_s, kept)
    if isinstance(answer, Completion):
        ends.counts["whole"] += 1
        ends.recent_s.append(answer.e2e_s)
    elif aborts and answer.reason.startswith("no end of the answer"):
        ends.counts["cut"] += 1
    else:
        ends.counts["failed"] += 1
        ends.failures.append(answer.reason)


async def _look(target: Target, draw: random.Random, prompts: int, pid: int) -> Checkpoint:
    rates, ttfts = [], []
    async with connect(target.endpoint) as connection:
        for _ in range(_PROBES):
            prompt = _prompt(target, draw, _PROBE_TOKENS)
            for again in (False, True):
                answer = await _complete(target, connection, prompt, target.timeout_s, {})
                if isinstance(answer, Failure):
                    raise CampaignError(f"a probe failed: {answer.reason}")
                if again:
                    rates.append((answer.cached_tokens or 0) / (_PROBE_TOKENS - 1))
                    ttfts.append(answer.ttft_s * 1e3)
    page = await _idle_page(target)
    return Checkpoint(
        prompts=prompts,
        blocks=_blocks(page),
        used_bytes={
            labels["tier"]: round(value) for labels, value in samples(page, "forebay_cache_bytes")
        },
        rss_bytes=rss_bytes(pid),
        redis_rss_bytes=descendants_rss_bytes(pid),
        probe_hit_rate=sum(rates) / len(rates),
        probe_ttft_ms=median(ttfts),
    )


async def _idle_page(target: Target) -> str:
    """The metrics once nothing is held, or as they are when time is up."""
    deadline_s = time.monotonic() + _IDLE_S
    while True:
        try:
            answer = await fetch(target.endpoint, "GET", "/metrics")
        except ExchangeError as error:
            raise CampaignError(f"/metrics: {error}") from None
        if answer.status != 200:
            raise CampaignError(f"/metrics: {refusal(answer)}")
        page = answer.body.decode()
        held = sum(states.get("held", 0) for states in _blocks(page).values())
        if not held or time.monotonic() > deadline_s:
            return page
        await asyncio.sleep(_POLL_S)


async def _complete(
    target: Target,
    connection: Connection,
    prompt: tuple[int, ...],
    limit_s: float,
    fields: Mapping[str, str],
) -> Completion | Failure:
    body = completion_body(target.model, prompt, _OUTPUT_TOKENS, stream=True, **fields)
    request = target.endpoint.request("POST", target.completions_path, body)
    try:
        answer = await connection.exchange(request, limit_s)
    except ExchangeError as error:
        return Failure("", str(error))
    return read_stream(
        answer, pass_name="", prompt_tokens=len(prompt), output_tokens=_OUTPUT_TOKENS
    )


def _prompt(target: Target, draw: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(*target.vocabulary), k=tokens))


def _blocks(page: str) -> dict[str, dict[str, int]]:
    blocks: dict[str, dict[str, int]] = {}
    for labels, value in samples(page, "forebay_cache_blocks"):
        blocks.setdefault(labels["tier"], {})[labels["state"]] = round(value)
    return blocks


def samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of every sample of one metric on a page in Prometheus' text format."""
    return [
        (dict(_LABEL.findall(match[2] or "")), float(match[3]))
        for match in _SAMPLE.finditer(page)
        if match[1] == name
    ]
