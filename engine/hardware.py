"""What the machine offers: device, number format, cores."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.errors import ModelLoadError


def choose_device(requested: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU; others are taken at their
    word. Raises ModelLoadError when CUDA is asked for and not there."""
    if requested == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(requested)
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            raise ModelLoadError(
                f"device {requested}: torch sees {found} CUDA devices; use device: cpu or auto"
            )
    return device


def choose_dtype(requested: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, else float32."""
    if requested != "auto":
        named: torch.dtype = getattr(torch, requested)
        return named
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has AVX512-BF16 or AMX (read from Linux's /proc; False elsewhere)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def memory_bytes(device: torch.device) -> int:
    """All the memory that the device has, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def physical_cores() -> int:
    """Cores this process may use, two hardware threads of one core counted once."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # macOS has no affinity
        return os.cpu_count() or 1
    siblings = set()
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(path.read_text())
        except OSError:
            siblings.add(str(cpu))
    return max(1, len(siblings))


def choose_threads(requested: int | None) -> int:
    """Threads for a CPU engine: None leaves one core to the gateway where there are more than two.

    On two cores both compute: the event loop needs little, and a step that it delays loses less
    than a core left idle would cost.
    """
    if requested is not None:
        return requested
    cores = physical_cores()
    return cores if cores <= 2 else cores - 1
