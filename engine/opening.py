"""From a loaded model to a running executor: which one, with how many pages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cache.identity import CacheIdentity
from engine.architecture import Architecture
from engine.decoder import build_program
from engine.errors import ModelLoadError
from engine.executors.base import Executor
from engine.executors.native import NativeExecutor, NativeUnavailable, native_bytes_per_block
from engine.executors.torch_executor import TorchExecutor, torch_bytes_per_block
from engine.hardware import choose_threads, memory_bytes
from engine.model import Model

_log = logging.getLogger("forebay.engine")

_CPU_POOL_BYTES = 512 << 20
_CUDA_POOL_SHARE = 0.85  # of what is free once the weights are in; the rest is for activations


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """`pool_bytes` None: 512 MiB on a CPU, a share of the free memory on CUDA. `threads` None: see
    `choose_threads`."""

    device: torch.device
    dtype: torch.dtype
    block_tokens: int = 16
    pool_bytes: int | None = None
    threads: int | None = None
    step_tokens: int = 256


def open_executor(
    architecture: Architecture,
    weights: dict[str, torch.Tensor],
    options: ExecutorOptions,
    *,
    say: Callable[[str], None] = _log.info,
) -> Executor:
    """The fastest executor that can run this model here; takes its weights out of `weights`.

    On a CPU that is the native one, else torch, with a warning that says why; `say` is told of
    compiling. Raises ModelLoadError when the pool is too small for one block or larger than the
    device's memory.
    """
    program = build_program(architecture)
    if options.device.type == "cpu" and options.dtype in (torch.float32, torch.bfloat16):
        try:
            block_bytes = native_bytes_per_block(architecture, options.dtype, options.block_tokens)
            executor = NativeExecutor(
                program,
                weights,
                dtype=options.dtype,
                blocks=_blocks(weights, options, block_bytes),
                block_tokens=options.block_tokens,
                threads=choose_threads(options.threads),
                max_tokens=options.step_tokens,
                say=say,
            )
            # what is left to torch is the sampler: threads of its own would fight for the cores
            torch.set_num_threads(1)
            return executor
        except NativeUnavailable as reason:
            _log.warning("native CPU kernels are off (%s); running on torch, slower", reason)
    if options.device.type == "cpu":
        torch.set_num_threads(choose_threads(options.threads))
    block_bytes = torch_bytes_per_block(architecture, options.dtype, options.block_tokens)
    return TorchExecutor(
        program,
        weights,
        device=options.device,
        dtype=options.dtype,
        blocks=_blocks(weights, options, block_bytes),
        block_tokens=options.block_tokens,
    )


def cache_identity(model: Model, executor: Executor) -> CacheIdentity:
    """Which numbers this executor's pages hold."""
    return CacheIdentity(
        weights=model.fingerprint,
        adapter="",
        kv_dtype=str(executor.dtype).removeprefix("torch."),
        layout=executor.kv_layout,
        block_tokens=executor.block_tokens,
        topology="tp1",
    )


def _blocks(weights: dict[str, torch.Tensor], options: ExecutorOptions, block_bytes: int) -> int:
    pool_bytes = options.pool_bytes
    if pool_bytes is None:
        pool_bytes = _CPU_POOL_BYTES
        if options.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(options.device)
            to_move = sum(each.nbytes for each in weights.values() if each.device.type == "cpu")
            pool_bytes = int((free - to_move) * _CUDA_POOL_SHARE)
    memory = memory_bytes(options.device)
    if pool_bytes > memory:
        raise ModelLoadError(
            f"cache.device of {pool_bytes} bytes is more than the {memory} bytes of memory that "
            f"{options.device} has"
        )
    blocks = pool_bytes // block_bytes
    if blocks < 1:
        raise ModelLoadError(
            f"cache.device of {pool_bytes} bytes is smaller than one block of {block_bytes} bytes"
        )
    return blocks
