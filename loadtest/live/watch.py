"""The server's own figures over time, from its page of Prometheus metrics.

Only the lines that matter are kept of each page, and they are read after the run.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from loadtest.record import Sample
from loadtest.wire.connection import Connection, Endpoint, ExchangeError, connect

_PATIENCE_S = 2.0
_COUNTERS = (
    "prompt_tokens",
    "cached_device_tokens",
    "cached_dram_tokens",
    "cached_redis_tokens",
)
"""Fields of a sample that count from the run's beginning."""

_FIELD_OF: dict[str, str] = {
    "forebay_running": "running",
    "forebay_waiting": "waiting",
    "forebay_admission_waiting": "waiting",
    "forebay_prompt_tokens_total": "prompt_tokens",
    "forebay_cached_tokens_by_tier_total|device": "cached_device_tokens",
    "forebay_cached_tokens_by_tier_total|dram": "cached_dram_tokens",
    "forebay_cached_tokens_by_tier_total|redis": "cached_redis_tokens",
    "forebay_cache_bytes|device": "device_bytes",
    "forebay_cache_bytes|dram": "dram_bytes",
    "forebay_cache_bytes|redis": "redis_bytes",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_device_tokens",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "sglang:cached_tokens_total|device": "cached_device_tokens",
    "sglang:cached_tokens_total|host": "cached_dram_tokens",
    "llamacpp:requests_processing": "running",
    "llamacpp:requests_deferred": "waiting",
}
"""Which field a series adds to: by its metric, or by its metric and its tier."""

_TIER = re.compile(rb'[{,](?:tier|cache_source)="([^"]*)"')
_METRICS = "|".join(sorted({name.partition("|")[0] for name in _FIELD_OF}))
_SERIES = re.compile(rf"^({_METRICS})(\{{[^\n]*\}})? ([^ \n]+)(?: \d+)?$".encode(), re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Watch:
    """Whose metrics are looked at, and how often. `endpoint` has the key that they need, if any."""

    endpoint: Endpoint
    every_s: float = 1.0
    path: str = "/metrics"


class _Page(NamedTuple):
    at_s: float
    series: list[tuple[bytes, bytes, bytes]]
    """Metric, labels and value of each line that matters."""


@dataclass(slots=True)
class Pages:
    """What was seen of the metrics, on the clock of `time.perf_counter`."""

    seen: list[_Page] = field(default_factory=list)

    def timeline(self, began_s: float) -> tuple[Sample, ...]:
        """The pages as samples of a run that began then; nothing if they say nothing."""
        values = [_values(page.series) for page in self.seen]
        if not any(values):
            return ()
        told = set().union(*values)
        first = values[0]
        samples = []
        for page, of_page in zip(self.seen, values, strict=True):
            # A counter has no series before the first that it counts.
            counts = {
                name: of_page.get(name, 0.0) - first.get(name, 0.0)
                for name in _COUNTERS
                if name in told
            }
            samples.append(Sample(max(0.0, page.at_s - began_s), **of_page | counts))
        return tuple(samples)


@asynccontextmanager
async def watched(watch: Watch | None) -> AsyncIterator[Pages]:
    """Look at the metrics when the scope begins, ends, and in between. A server that does not show
    any, or not to us, is not asked again."""
    pages = Pages()
    if watch is None:
        yield pages
        return
    async with connect(watch.endpoint) as connection:
        if not await _look(watch, connection, pages):
            yield pages
            return
        looking = asyncio.ensure_future(_keep_looking(watch, connection, pages))
        try:
            yield pages
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        await _look(watch, connection, pages)


async def _keep_looking(watch: Watch, connection: Connection, pages: Pages) -> None:
    while True:
        await asyncio.sleep(watch.every_s)
        await _look(watch, connection, pages)


async def _look(watch: Watch, connection: Connection, pages: Pages) -> bool:
    """Whether there was something to see. The time is that of the asking: a busy server answers
    late what it counted when it was asked."""
    at_s = time.perf_counter()
    try:
        answer = await connection.exchange(watch.endpoint.request("GET", watch.path), _PATIENCE_S)
    except ExchangeError:
        return False
    if answer.status != 200:
        return False
    pages.seen.append(_Page(at_s, _SERIES.findall(answer.body)))
    return True


def _values(series: Iterable[tuple[bytes, bytes, bytes]]) -> dict[str, float]:
    """The sums by field. Of Redis, which all replicas share, each counts the whole."""
    values: dict[str, float] = {}
    for name, value in _by_field(series):
        if name == "redis_bytes":
            values[name] = max(value, values.get(name, 0.0))
        else:
            values[name] = value + values.get(name, 0.0)
    return values


def _by_field(series: Iterable[tuple[bytes, bytes, bytes]]) -> Iterator[tuple[str, float]]:
    for metric, labels, value in series:
        key = metric.decode()
        if key not in _FIELD_OF:
            tier = _TIER.search(labels)
            key = f"{key}|{tier[1].decode(errors='replace')}" if tier is not None else key
        if key in _FIELD_OF and (number := _number(value)) is not None:
            yield _FIELD_OF[key], number


def _number(text: bytes) -> float | None:
    """None for what says nothing: a page may hold NaN, and need not be one of Prometheus at all."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
