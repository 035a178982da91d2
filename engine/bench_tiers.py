"""How long a prompt waits for its first token, by where its KV lies; without a gateway.

    python -m engine.bench_tiers --shape 135m --prompts 512,1024
    python -m engine.bench_tiers --shape 8b --device cuda --prompts 1024,8192,32768 --redis unix:///…

The weights are random: timings depend on the model's shape alone. Every cell is checked to have
come from its tier and to have generated the cold run's tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cache.block import Tier
from cache.identity import CacheIdentity
from cache.redis_options import RedisOptions
from cache.redis_store import RedisStore
from cache.report import CacheUse
from cache.tiered_cache import TieredCache
from engine.caching import CacheOptions, measure_cost, tiers_opener
from engine.engine import Engine, EngineOptions
from engine.executors.base import Executor
from engine.opening import ExecutorOptions, open_executor
from engine.random_models import SHAPES, random_llama, random_weights
from engine.report import StepReport
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

_ROOT = b"bench-tiers-root"
_NEW_TOKENS = 8
_QUIET_S = 60.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt length from one tier: seconds to the first token, the median and all of them."""

    prompt_tokens: int
    tier: str
    ttft_s: float
    samples_s: tuple[float, ...]
    share_of_cold: float


class _Bench:
    """One engine, asked one prompt at a time."""

    def __init__(self, args: argparse.Namespace, redis: RedisStore | None) -> None:
        device, dtype = torch.device(args.device), getattr(torch, args.dtype)
        architecture = random_llama(args.shape, max(args.prompts) + 64)
        weights = random_weights(architecture, dtype, device)
        self.vocab_size = architecture.vocab_size
        parameters = sum(tensor.numel() for tensor in weights.values())
        self.executor: Executor = open_executor(
            architecture,
            weights,
            ExecutorOptions(
                device, dtype, pool_bytes=args.device_mib << 20, step_tokens=args.step_tokens
            ),
        )
        identity = CacheIdentity(
            os.urandom(16).hex(), "", args.dtype, self.executor.kv_layout, 16, "tp1"
        )
        cost = measure_cost(
            self.executor,
            parameters,
            step_tokens=args.step_tokens,
            max_context=architecture.max_positions,
        )
        opener = tiers_opener(
            cost,
            identity,
            CacheOptions(
                dram_bytes=args.dram_mib << 20,
                redis=redis,
                write_through=True,
                ahead_tokens=2 * args.step_tokens,
                max_context=architecture.max_positions,
            ),
        )
        self.cache: TieredCache

        def open_cache(executor: Executor, wake: Callable[[], None]) -> TieredCache:
            self.cache = opener(executor, wake)
            return self.cache

        self._done = threading.Event()
        self._first_s = 0.0
        self._tokens: list[int] = []
        self.use: CacheUse | None = None
        self._count = 0
        options = EngineOptions(
            architecture.max_positions, max_running=64, step_tokens=args.step_tokens
        )
        self.engine = Engine(self.executor, frozenset(), options, self._hear, open_cache)
        self.engine.start()

    def ask(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds to the first token, and the tokens; waits until the tiers have come to rest."""
        self._done.clear()
        self._first_s, self._tokens, self.use = 0.0, [], None
        self._count += 1
        params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        self.engine.submit(EngineRequest(str(self._count), prompt, params, _ROOT))
        if not self._done.wait(600):
            raise TimeoutError("the engine does not answer")
        ttft_s = self._first_s - started
        deadline = time.monotonic() + _QUIET_S
        while not self.engine.call(lambda: self.cache.quiet) and time.monotonic() < deadline:
            time.sleep(0.001)
        return ttft_s, list(self._tokens)

    def leave_only(self, tier: Tier) -> None:
        """Empty every tier above `tier`."""

        def clear() -> None:
            if tier is not Tier.DEVICE:
                self.cache.device.clear()
            if tier is Tier.REDIS:
                self.cache.clear_dram()

        self.engine.call(clear)

    def _hear(self, report: StepReport) -> None:
        for output in report.outputs:
            if output.token_ids and not self._tokens:
                self._first_s = time.perf_counter()
                self.use = output.cache_use
            self._tokens += output.token_ids
            if output.finish_reason is not None:
                self._done.set()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; prints a table, or one JSON object with `--json`."""
    args = _parse(argv)
    redis = None
    if args.redis:
        redis = RedisStore(RedisOptions(args.redis, b"bench", timeout_s=1.0, queue_bytes=4 << 30))
        redis.start()
        redis.check_secret(5.0)
    bench = _Bench(args, redis)
    try:
        cells = [cell for length in args.prompts for cell in _measure(bench, length, args, redis)]
        stats = {tier.tier: tier for tier in bench.engine.cache_stats().tiers}
    finally:
        bench.engine.close()
        if redis is not None:
            redis.close(5.0)
    where = _device_name(args.device)
    if args.json:
        rows = [
            {"prompt_tokens": c.prompt_tokens, "tier": c.tier, "ttft_ms": c.ttft_s * 1e3}
            for c in cells
        ]
        print(json.dumps({"device": where, "shape": args.shape, "cells": rows}))  # noqa: T201
        return 0
    lines = [f"{args.shape} {args.dtype}, {where}: time to the first token, median of {args.n}"]
    lines += [
        f"  {c.prompt_tokens:>6} tokens  {c.tier:<7}{c.ttft_s * 1e3:>9.2f} ms"
        f"{c.share_of_cold:>8.1%} of cold"
        for c in cells
    ]
    dram = stats.get(Tier.DRAM)
    if dram is not None and dram.load_s:
        rate = dram.loads * dram.total_bytes / dram.total / dram.load_s / 1e9
        lines.append(f"  DRAM to device: {rate:.1f} GB/s")
    print("\n".join(lines))  # noqa: T201 - the command's output
    return 0


def _measure(
    bench: _Bench, length: int, args: argparse.Namespace, redis: RedisStore | None
) -> list[Cell]:
    tiers = [Tier.DEVICE, Tier.DRAM, *([Tier.REDIS] if redis is not None else [])]
    times: dict[str, list[float]] = {"cold": [], **{tier: [] for tier in tiers}}
    generator = np.random.default_rng(length)
    vocabulary = bench.vocab_size
    for _ in range(args.n):
        prompt = generator.integers(0, vocabulary, length).tolist()
        seconds, expected = bench.ask(prompt)
        times["cold"].append(seconds)
        bench.ask(prompt)  # seen twice: on to Redis
        for tier in tiers:
            bench.leave_only(tier)
            seconds, tokens = bench.ask(prompt)
            _check(bench.use, tier, length, tokens == expected, args.dtype)
            times[tier].append(seconds)
    cold = statistics.median(times["cold"])
    return [
        Cell(
            length,
            name,
            statistics.median(samples),
            tuple(samples),
            statistics.median(samples) / cold,
        )
        for name, samples in times.items()
    ]


def _check(use: CacheUse | None, tier: Tier, length: int, same: bool, dtype: str) -> None:
    """At 16 bit, other batch shapes round otherwise on some devices: there only the tier counts."""
    if use is None:
        raise RuntimeError("the engine did not say where the prompt came from")
    found = {
        Tier.DEVICE: use.device_tokens,
        Tier.DRAM: use.dram_tokens,
        Tier.REDIS: use.redis_tokens,
    }
    expected = (length - 1) // use.block_tokens * use.block_tokens
    if found[tier] < expected:
        raise RuntimeError(f"{expected} tokens expected from {tier}, found {found}: {use.runs}")
    if not same and dtype == "float32":
        raise RuntimeError(f"another text from {tier} than cold")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.bench_tiers", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--prompts",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[512, 1024],
        help="lengths in tokens, separated by commas",
    )
    parser.add_argument("-n", type=int, default=5, help="prompts of each length")
    parser.add_argument("--step-tokens", type=int, default=256)
    parser.add_argument("--device-mib", type=int, default=512, help="the device pool")
    parser.add_argument("--dram-mib", type=int, default=1024, help="the DRAM tier")
    parser.add_argument("--redis", default="", help="a URL; without one Redis is left out")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return f"CPU with {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
