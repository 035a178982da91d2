"""The machine in a few lines: a figure means nothing without it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Processor, cores, memory, system and Python, one line each."""
    model, flags = platform.processor() or platform.machine(), ""
    try:
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() == "flags":
                flags = value
    except OSError:
        pass  # No such file outside Linux: the platform's own name has to do.
    telling = [flag for flag in _TELLING_FLAGS if flag in flags.split()]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"CPU: {model}, {os.cpu_count()} cores" + (f" ({' '.join(telling)})" if telling else ""),
        f"memory: {memory_gib:.0f} GiB",
        f"system: {platform.system()} {platform.release()}, Python {platform.python_version()}",
    ]
