"""A worker's process against this one: tokens per second and time to the first token.

    python -m gateway.replicas.bench_worker
    python -m gateway.replicas.bench_worker --model /models/some.gguf --streams 8 --repeats 5

Closed streams of random prompts, the same for every kind of replica and in turn, so that what else
the machine does is shared fairly. `worker, bound` computes on cores of its own and leaves one to
the gateway, `worker, free` with as many threads as this process would.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import uvloop

from engine.hardware import choose_threads
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from gateway.load_progress import no_progress
from gateway.replica import Replica
from gateway.replicas.engine_opening import load_engine
from gateway.replicas.in_process import InProcessReplica
from gateway.replicas.worker.cores import usable_cores
from gateway.replicas.worker.messages import CoreShare
from gateway.replicas.worker.replica import WorkerReplica
from gateway.replicas.worker.work_order import WorkOrder
from gateway.settings import ModelSettings

_VOCABULARY = range(256, 48_000)
"""Of the bundled model, without its control tokens; other models need at least as many."""


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` at once, each of them one prompt and one answer of these lengths in tokens."""

    streams: int
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """One kind of replica: tokens per second of each repetition, seconds to each first token, and
    this process's own CPU seconds for each repetition."""

    tokens_per_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    own_cpu_s: list[float] = field(default_factory=list)


async def measure(replica: Replica, load: Load, seed: str, outcome: Outcome) -> None:
    """One repetition, with prompts that no other has."""
    draw = random.Random(seed)
    requests = [
        EngineRequest(
            f"{seed}/{number}",
            draw.choices(_VOCABULARY, k=load.prompt_tokens),
            SamplingParams(max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True),
            None,
        )
        for number in range(load.streams)
    ]

    async def stream(request: EngineRequest) -> int:
        began_s, tokens = time.perf_counter(), 0
        async with replica.submit(request) as outputs:
            async for output in outputs:
                if not tokens:
                    outcome.ttft_s.append(time.perf_counter() - began_s)
                tokens += len(output.token_ids)
        return tokens

    cpu_s, began_s = time.process_time(), time.perf_counter()
    tokens = sum(await asyncio.gather(*map(stream, requests)))
    outcome.tokens_per_s.append(tokens / (time.perf_counter() - began_s))
    outcome.own_cpu_s.append(time.process_time() - cpu_s)


@asynccontextmanager
async def _in_process(settings: ModelSettings) -> AsyncIterator[Replica]:
    loaded = await asyncio.to_thread(load_engine, settings, no_progress)
    replica = InProcessReplica(
        "in-process",
        lambda sink: loaded.open(sink, None),
        max_open=1024,
        cost=loaded.facts.cost,
        observe=lambda _name, _report: None,
    )
    replica.start()
    try:
        yield replica
    finally:
        await replica.close()


@asynccontextmanager
async def _worker(settings: ModelSettings, cores: CoreShare) -> AsyncIterator[Replica]:
    replica = WorkerReplica(
        "worker",
        WorkOrder(settings, cores, os.environ),
        max_open=1024,
        on_ready=lambda _name, _facts: None,
        observe=lambda _name, _report: None,
        on_health=lambda _name, _health: None,
    )
    await replica.start(no_progress)
    try:
        yield replica
    finally:
        await replica.close()


async def compare(settings: ModelSettings, load: Load, repeats: int) -> dict[str, Outcome]:
    """Every kind of replica, one after the other in each repetition."""
    cores = usable_cores()
    own = tuple(cpu for core in cores[1:] for cpu in core)
    kinds = {
        "in-process": _in_process(settings),
        "worker, free": _worker(settings, CoreShare((), choose_threads(None))),
    }
    if own:
        kinds["worker, bound"] = _worker(settings, CoreShare(own, len(cores) - 1))
    outcomes = {kind: Outcome() for kind in kinds}
    async with AsyncExitStack() as held:
        replicas = {kind: await held.enter_async_context(kinds[kind]) for kind in kinds}
        for kind, replica in replicas.items():  # once unseen, to warm up
            await measure(replica, load, f"warm-up {kind}", Outcome())
        for repeat in range(repeats):
            for kind, replica in replicas.items():
                await measure(replica, load, str(repeat), outcomes[kind])
    return outcomes


def report(outcomes: dict[str, Outcome]) -> str:
    """A table: medians, and the ratio to the first kind."""
    first = next(iter(outcomes.values()))
    rate = statistics.median(first.tokens_per_s)
    wait_s = statistics.median(first.ttft_s)
    lines = [f"{'':16}{'tok/s':>8}{'ratio':>7}{'TTFT ms':>9}{'ratio':>7}{'own CPU s':>11}"]
    for kind, outcome in outcomes.items():
        own_rate = statistics.median(outcome.tokens_per_s)
        own_wait_s = statistics.median(outcome.ttft_s)
        lines.append(
            f"{kind:16}{own_rate:8.0f}{own_rate / rate:7.2f}"
            f"{1e3 * own_wait_s:9.1f}{own_wait_s / wait_s:7.2f}"
            f"{statistics.median(outcome.own_cpu_s):11.3f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m gateway.replicas.bench_worker")
    parser.add_argument("--model", default="bundled", help="bundled, a .gguf file or a directory")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    settings = ModelSettings.model_validate(
        {
            "name": "m",
            "path": args.model,
            "device": args.device,
            "cache": {"device": "512MiB", "dram": 0},
        }
    )
    load = Load(args.streams, args.prompt, args.output)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(report(runner.run(compare(settings, load, args.repeats))))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
