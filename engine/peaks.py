"""What the device can do at best, measured and not taken from a data sheet.

A data sheet tells of a clock that cores do not keep up under load, and of memory that nobody else
uses. What a large product of dense matrices and a pass over memory reach here, a step could reach
too; and the yardstick is the same on a laptop and on a GPU. Both are the best of a few runs,
because a machine is rarely idle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from engine.executors.base import Executor
from engine.report import Peaks
from engine.sampling.torch_threads import one_torch_thread

_log = logging.getLogger("forebay.engine")

_SIDES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
"""Of square matrices: the first ones are for devices that are slow at the last."""
_LONGEST_RUN_S = 0.02
_LEAST_RUNS = 3
_PRODUCT_S = 0.01
"""For each size of matrices."""
_MEMORY_S = 0.06
_MEMORY_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}
"""Read at once: more than caches hold."""


@runtime_checkable
class ReadsMemory(Protocol):
    """An executor that can read memory with all of its threads and do nothing else."""

    def read_memory(self, region: torch.Tensor) -> None:
        """Read every byte of a contiguous tensor."""
        ...


def measure_peaks(executor: Executor, threads: int) -> Peaks | None:
    """For an executor that has run steps before, as its threads may not have found cores of their
    own yet, and runs none meanwhile; on a CPU with so many threads. Takes about 0.2 s. None, with a
    warning, where it cannot be done, mostly for want of memory."""
    try:
        return Peaks(_flops_per_s(executor, threads), _bytes_per_s(executor))
    except RuntimeError as error:  # what torch raises where memory runs out, on every device
        _log.warning("what %s can do was not measured: %s", executor.device, error)
        return None
    finally:
        if executor.device.type == "cuda":
            torch.cuda.empty_cache()


def _flops_per_s(executor: Executor, threads: int) -> float:
    """On a CPU one thread's times `threads`: all at once would wake torch's thread team, which then
    is in the way of the executor's own."""
    device = executor.device
    if device.type == "cpu":
        with one_torch_thread():
            return threads * _product_flops_per_s(device, executor.dtype)
    return _product_flops_per_s(device, executor.dtype)


def _product_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    best = 0.0
    for side in _SIDES[device.type]:
        flops = 2 * side**3
        if best and flops / best > _LONGEST_RUN_S:
            break
        one, other = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
        result = torch.empty_like(one)
        seconds = _least_s(device, _PRODUCT_S, partial(torch.mm, one, other, out=result))
        best = max(best, flops / seconds)
    return best


def _bytes_per_s(executor: Executor) -> float:
    device = executor.device
    region = torch.ones(_MEMORY_BYTES[device.type], dtype=torch.uint8, device=device)
    if device.type == "cuda":
        copy = torch.empty_like(region)
        return 2 * region.nbytes / _least_s(device, _MEMORY_S, lambda: copy.copy_(region))
    if isinstance(executor, ReadsMemory):
        return region.nbytes / _least_s(device, _MEMORY_S, lambda: executor.read_memory(region))
    numbers = region.view(torch.float32)
    return region.nbytes / _least_s(device, _MEMORY_S, numbers.sum)


def _least_s(device: torch.device, seconds: float, run: Callable[[], object]) -> float:
    """The shortest of as many runs as fit into `seconds`, three at least, after one that may have
    to choose and load kernels."""
    _seconds(device, run)
    until = time.perf_counter() + seconds
    times = [_seconds(device, run) for _ in range(_LEAST_RUNS)]
    while time.perf_counter() < until:
        times.append(_seconds(device, run))
    return min(times)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
