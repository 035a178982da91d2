"""Times the native executor's steps: `python -m engine.executors.native_bench`.

Weights are random and in the shape of SmolLM2-135M; a step's time does not depend on their values.
Each figure is the least of several, because the machine is rarely idle.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.decoder import build_program
from engine.executors.base import StepBatch
from engine.executors.native import NativeExecutor, NativeUnavailable
from engine.executors.native_library import ISA_NUMBERS
from engine.hardware import choose_threads
from engine.random_models import random_llama, random_weights

_BLOCK_TOKENS = 16
_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class StepShape:
    """`sequences` queries of `query` tokens each, the last of `context` tokens, of which `shared`
    lie in the same pages."""

    name: str
    sequences: int
    query: int
    context: int
    shared: int = 0


_STEPS = (
    StepShape("decode, 1 x 192", 1, 1, 192),
    StepShape("decode, 1 x 2048", 1, 1, 2048),
    StepShape("decode, 8 x 192", 8, 1, 192),
    StepShape("decode, 16 x 192", 16, 1, 192),
    StepShape("decode, 16 x (1024 shared + 64)", 16, 1, 1088, 1024),
    StepShape("decode, 32 x 192", 32, 1, 192),
    StepShape("prefill, 64", 1, 64, 64),
    StepShape("prefill, 16 after 1024", 1, 16, 1040),
    StepShape("prefill, 512", 1, 512, 512),
    StepShape("prefill, 1024", 1, 1024, 1024),
)


def step_batch(shape: StepShape) -> StepBatch:
    """The step that `shape` describes, logits for each sequence's last row."""
    rows = shape.sequences * shape.query
    blocks = -(-shape.context // _BLOCK_TOKENS)
    shared = shape.shared // _BLOCK_TOKENS
    own = blocks - shared
    tables = np.empty((shape.sequences, blocks), dtype=np.int32)
    tables[:, :shared] = np.arange(shared)
    tables[:, shared:] = shared + np.arange(shape.sequences * own).reshape(shape.sequences, own)
    positions = np.arange(shape.context - shape.query, shape.context)
    ends = np.arange(1, shape.sequences + 1) * shape.query
    return StepBatch(
        token_ids=np.random.default_rng(0).integers(0, 49152, rows).astype(np.int32),
        positions=np.tile(positions, shape.sequences).astype(np.int32),
        query_starts=np.concatenate([[0], ends]).astype(np.int32),
        context_lengths=np.full(shape.sequences, shape.context, dtype=np.int32),
        block_tables=tables,
        logit_rows=(ends - 1).astype(np.int32),
    )


def least_ms(run: Callable[[], object], seconds: float) -> float:
    """The shortest of as many runs as fit into `seconds` (three at least), in milliseconds."""
    least, runs, until = float("inf"), 0, time.perf_counter() + seconds
    while runs < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - started)
        runs += 1
    return least * 1e3


def open_bench_executor(isa: str, dtype: torch.dtype, threads: int) -> tuple[NativeExecutor, int]:
    """The bundled model's shape on one instruction set, and its weights' bytes.

    Raises NativeUnavailable.
    """
    os.environ["FOREBAY_NATIVE_ISA"] = isa
    program = build_program(random_llama("135m", 8192))
    weights = random_weights(program.architecture, dtype)
    weight_bytes = sum(tensor.nbytes for tensor in weights.values())
    executor = NativeExecutor(
        program,
        weights,
        dtype=dtype,
        blocks=_BLOCKS,
        block_tokens=_BLOCK_TOKENS,
        threads=threads,
        max_tokens=1024,
        say=_print,
    )
    return executor, weight_bytes


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _memory_line(executor: NativeExecutor) -> str:
    region = torch.ones(512 << 20, dtype=torch.uint8)
    ms = least_ms(lambda: executor.read_memory(region), 1.0)
    return f"reading memory: {region.nbytes / ms / 1e6:.1f} GB/s"


def main() -> None:
    """Print milliseconds per step for every step shape, and where they go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=choose_threads(None))
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure")
    parser.add_argument("--isa", action="append", choices=[*ISA_NUMBERS, "float32"])
    parser.add_argument("--step", default="", help="only steps whose name contains this")
    parser.add_argument("--profile", action="store_true", help="milliseconds by kind of op")
    options = parser.parse_args()
    for isa in options.isa or ("amx", "avx512bf16", "portable", "float32"):
        dtype = torch.float32 if isa == "float32" else torch.bfloat16
        try:
            executor, weight_bytes = open_bench_executor(
                "auto" if isa == "float32" else isa, dtype, options.threads
            )
        except NativeUnavailable as reason:
            _print(f"{isa}: {reason}")
            continue
        _print(f"{isa}, {options.threads} threads; {_memory_line(executor)}")
        for shape in _STEPS:
            if options.step in shape.name:
                _report(executor, shape, weight_bytes, options.seconds, options.profile)
        executor.close()


def _report(
    executor: NativeExecutor, shape: StepShape, weight_bytes: int, seconds: float, profile: bool
) -> None:
    batch = step_batch(shape)
    executor.forward(batch)
    ms = least_ms(lambda: executor.forward(batch), seconds)
    _print(f"  {shape.name:34} {ms:8.2f} ms   weights at {weight_bytes / ms / 1e6:6.1f} GB/s")
    if profile:
        executor.profile()
        runs = 10
        for _ in range(runs):
            executor.forward(batch)
        spent = {kind: total / runs for kind, total in executor.profile().items() if total}
        _print("    " + ", ".join(f"{kind} {total:.2f}" for kind, total in spent.items()))


if __name__ == "__main__":
    main()
