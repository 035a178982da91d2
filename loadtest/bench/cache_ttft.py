"""TTFT of one prompt cold, and from each tier.

A tier is measured by leaving the prompt nowhere above it. The device pool has room for one prompt
of full length and nothing else, so that a filler of that length pushes everything out of it. From
which tier an answer really came is read off the server's own counters, and an answer that came from
elsewhere enters no figure.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loadtest.bench.cache_valkey import RunningValkey
from loadtest.bench.campaign import CampaignError, Tell, warm_up
from loadtest.bench.completion import Completion, Failure, completion_body, read_stream, refusal
from loadtest.forebay_server import MODEL, RunningServer, running_forebay
from loadtest.target import Target
from loadtest.wire.connection import Connection, ExchangeError, connect, fetch

COLD = "cold"
DEVICE = "device"
DRAM = "DRAM"
REDIS_UNIX = "Redis, unix socket"
REDIS_TCP = "Redis, TCP"
RESTART = "Redis, after a restart"
WAYS = (COLD, DEVICE, DRAM, REDIS_UNIX, REDIS_TCP, RESTART)
"""Where a prompt can come from, in the order of the table."""

PROMPT_TOKENS = (512, 1024, 1900)
_OUTPUT_TOKENS = 8
_BLOCK_TOKENS = 16
_CONTEXT_TOKENS = 2048
_FILLER_TOKENS = _CONTEXT_TOKENS - _OUTPUT_TOKENS
_SERVED_SHARE = 0.9
"""An answer counts for a tier if that tier brought so much of the prompt's full blocks."""
_SETTLE_S = 10.0
_POLL_S = 0.02

SMALL_POOL = {
    "FOREBAY_MODELS__0__DTYPE": "bfloat16",
    "FOREBAY_MODELS__0__CACHE__DEVICE": "45MiB",
}
"""The bundled model's KV takes 23,040 bytes a token in bfloat16: 45 MiB are its 2,048 tokens."""

_CACHED = re.compile(r'^forebay_cached_tokens_by_tier_total{.*?tier="(\w+)".*?}\s+(\S+)', re.M)
_STORED = re.compile(r'^forebay_cache_stores_total{.*?tier="redis".*?}\s+(\S+)', re.M)
_KEPT = {"prompt_cache_retention": "24h"}
"""What has a prompt written to Redis at once."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. `by_tier` are the prompt tokens that each tier brought."""

    way: str
    prompt_tokens: int
    ttft_ms: float
    by_tier: Mapping[str, int]
    text: str

    @property
    def counts(self) -> bool:
        """Whether it came from where it should have."""
        tier = _TIER_OF[self.way]
        if tier is None:
            return not any(self.by_tier.values())
        blocks = (self.prompt_tokens - 1) // _BLOCK_TOKENS
        return self.by_tier.get(tier, 0) >= _SERVED_SHARE * blocks * _BLOCK_TOKENS


_TIER_OF: Mapping[str, str | None] = {
    COLD: None,
    DEVICE: "device",
    DRAM: "dram",
    REDIS_UNIX: "redis",
    REDIS_TCP: "redis",
    RESTART: "redis",
}


@dataclass(frozen=True, slots=True)
class TtftFigure:
    """One cell: the median of the answers that count, and how they compare with the same prompts'
    cold ones. None where no answer counts."""

    way: str
    prompt_tokens: int
    ttft_ms: float | None
    share_of_cold: float | None
    samples: int
    strays: int
    texts_that_differ: int


def sum_up_ttft(samples: Sequence[tuple[Sample, Sample]]) -> list[TtftFigure]:
    """One figure for each way and length there is, from pairs of a prompt's cold answer and a later
    one; the cold one is its own pair."""
    figures = []
    for way in WAYS:
        for prompt_tokens in PROMPT_TOKENS:
            pairs = [
                (cold, one)
                for cold, one in samples
                if one.way == way and one.prompt_tokens == prompt_tokens
            ]
            if not pairs:
                continue
            good = [(cold, one) for cold, one in pairs if one.counts and cold.counts]
            figures.append(
                TtftFigure(
                    way=way,
                    prompt_tokens=prompt_tokens,
                    ttft_ms=median(one.ttft_ms for _, one in good) if good else None,
                    share_of_cold=median(one.ttft_ms / cold.ttft_ms for cold, one in good)
                    if good
                    else None,
                    samples=len(good),
                    strays=len(pairs) - len(good),
                    texts_that_differ=sum(cold.text != one.text for cold, one in good),
                )
            )
    return figures


async def measure_ttft(
    valkey: RunningValkey, *, repeats: int, seed: int, tell: Tell
) -> list[TtftFigure]:
    """Every way at every length, `repeats` prompts each. Raises CampaignError."""
    draw = random.Random(f"cache/{seed}")
    samples: list[tuple[Sample, Sample]] = []
    tell("forebay with DRAM: cold, device, DRAM")
    async with running_forebay({**SMALL_POOL, "FOREBAY_REDIS__URL": "off"}) as server:
        samples += await _Asker(server, draw).measure_dram(repeats, seed)
    no_dram = {**SMALL_POOL, "FOREBAY_MODELS__0__CACHE__DRAM": "0"}
    with tempfile.TemporaryDirectory(prefix="forebay-loadtest-") as state:
        embedded = {**no_dram, "FOREBAY_REDIS__URL": "embedded"}
        tell("forebay with its own Valkey: Redis over a unix socket")
        async with running_forebay(embedded, state_dir=Path(state)) as server:
            asker = _Asker(server, draw)
            samples += await asker.measure_redis(REDIS_UNIX, repeats, seed)
        tell("forebay again, with what that Valkey had saved")
        async with running_forebay(embedded, state_dir=Path(state)) as server:
            samples += await _Asker(server, draw).measure_again(asker.known, seed)
    tell("forebay with a Valkey of the bench: Redis over TCP")
    async with running_forebay({**no_dram, "FOREBAY_REDIS__URL": valkey.tcp_url}) as server:
        samples += await _Asker(server, draw).measure_redis(REDIS_TCP, repeats, seed)
    return sum_up_ttft(samples)


@dataclass(frozen=True, slots=True)
class _Known:
    """A prompt that a server has answered, and its cold answer."""

    prompt: tuple[int, ...]
    cold: Sample


class _Asker:
    """Asks one server, one request at a time. `known` are the prompts that it has asked cold."""

    def __init__(self, server: RunningServer, draw: random.Random) -> None:
        self._target = Target("forebay", server.endpoint, MODEL)
        self._draw = draw
        self.known: list[_Known] = []

    async def measure_dram(self, repeats: int, seed: int) -> list[tuple[Sample, Sample]]:
        """Cold, from the device, and from DRAM."""
        await warm_up(self._target, seed)
        samples = []
        async with connect(self._target.endpoint) as connection:
            for prompt in self._prompts(repeats):
                cold = await self._ask(connection, COLD, prompt)
                device = await self._ask(connection, DEVICE, prompt)
                await self._fill(connection)
                dram = await self._ask(connection, DRAM, prompt)
                samples += [(cold, cold), (cold, device), (cold, dram)]
        return samples

    async def measure_redis(self, way: str, repeats: int, seed: int) -> list[tuple[Sample, Sample]]:
        """From Redis, right after it was written there; the cold answers are not in it."""
        await warm_up(self._target, seed)
        samples = []
        async with connect(self._target.endpoint) as connection:
            for prompt in self._prompts(repeats):
                before = await self._stored_blocks()
                cold = await self._ask(connection, COLD, prompt, **_KEPT)
                await self._until_stored(before + len(prompt) // _BLOCK_TOKENS)
                await self._fill(connection)
                samples.append((cold, await self._ask(connection, way, prompt)))
                self.known.append(_Known(prompt, cold))
        return samples

    async def measure_again(
        self, known: Sequence[_Known], seed: int
    ) -> list[tuple[Sample, Sample]]:
        """From Redis, on a server that has just started."""
        await warm_up(self._target, seed)
        async with connect(self._target.endpoint) as connection:
            return [(one.cold, await self._ask(connection, RESTART, one.prompt)) for one in known]

    def _prompts(self, repeats: int) -> list[tuple[int, ...]]:
        return [self._prompt(tokens) for _ in range(repeats) for tokens in PROMPT_TOKENS]

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        first, end = self._target.vocabulary
        return tuple(self._draw.choices(range(first, end), k=tokens))

    async def _fill(self, connection: Connection) -> None:
        """Push everything out of the device pool."""
        await self._complete(connection, self._prompt(_FILLER_TOKENS))

    async def _ask(
        self, connection: Connection, way: str, prompt: tuple[int, ...], **fields: object
    ) -> Sample:
        before = await self._cached_by_tier()
        answer = await self._complete(connection, prompt, **fields)
        after = await self._cached_by_tier()
        deadline_s = time.monotonic() + _SETTLE_S
        # Counted when the request is settled, a little after its last byte.
        while sum(after.values()) - sum(before.values()) < (answer.cached_tokens or 0):
            if time.monotonic() > deadline_s:
                raise CampaignError("forebay: an answer's cached tokens were never counted")
            await asyncio.sleep(_POLL_S)
            after = await self._cached_by_tier()
        return Sample(
            way=way,
            prompt_tokens=len(prompt),
            ttft_ms=answer.ttft_s * 1e3,
            by_tier={tier: count - before.get(tier, 0) for tier, count in after.items()},
            text=answer.text,
        )

    async def _complete(
        self, connection: Connection, prompt: tuple[int, ...], **fields: object
    ) -> Completion:
        body = completion_body(self._target.model, prompt, _OUTPUT_TOKENS, stream=True, **fields)
        request = self._target.endpoint.request("POST", self._target.completions_path, body)
        try:
            answer = await connection.exchange(request, self._target.timeout_s)
        except ExchangeError as error:
            raise CampaignError(f"forebay: {error}") from None
        read = read_stream(
            answer, pass_name="", prompt_tokens=len(prompt), output_tokens=_OUTPUT_TOKENS
        )
        if isinstance(read, Failure):
            raise CampaignError(f"forebay: {read.reason}")
        return read

    async def _cached_by_tier(self) -> dict[str, int]:
        page = await self._metrics()
        return cached_by_tier(page)

    async def _stored_blocks(self) -> float:
        return sum(float(match[1]) for match in _STORED.finditer(await self._metrics()))

    async def _until_stored(self, blocks: float) -> None:
        """Wait until Redis has taken so many. Too few in time show later, as strays."""
        deadline_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline_s:
            if await self._stored_blocks() >= blocks:
                return
            await asyncio.sleep(_POLL_S)

    async def _metrics(self) -> str:
        try:
            answer = await fetch(self._target.endpoint, "GET", "/metrics")
        except ExchangeError as error:
            raise CampaignError(f"/metrics: {error}") from None
        if answer.status != 200:
            raise CampaignError(f"/metrics: {refusal(answer)}")
        return answer.body.decode()


def cached_by_tier(page: str) -> dict[str, int]:
    """Prompt tokens that each tier brought since the start, from a metrics page; empty before the
    first."""
    found: dict[str, int] = {}
    for match in _CACHED.finditer(page):
        found[match[1]] = found.get(match[1], 0) + round(float(match[2]))
    return found
