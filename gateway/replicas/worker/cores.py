"""Which cores each worker of this machine computes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gateway.replicas.worker.messages import CoreShare

Core = tuple[int, ...]
"""The hardware threads of one physical core."""


def share_cores(
    threads: Sequence[int | None], cores: Sequence[Core] | None = None
) -> tuple[CoreShare, ...]:
    """One share for each worker; `threads` is what its settings ask for, None for an equal part.

    `cores` are the machine's unless given. The first core is left to the gateway and the rest dealt
    out, so that no worker disturbs another. Where that cannot be, because more threads are asked
    for than cores are left or there are only one or two of them, nobody is bound to any: then a
    core that one does not need is of use to another.
    """
    if not threads:
        return ()
    cores = usable_cores() if cores is None else cores
    spare = len(cores) - 1
    least = sum(asked or 1 for asked in threads)
    if len(cores) <= 2 or least > spare:
        equal = max(1, len(cores) // len(threads))
        return tuple(CoreShare((), asked or equal) for asked in threads)
    left = spare - least
    equals = sum(asked is None for asked in threads)
    shares, start = [], 1
    for asked in threads:
        count = asked or 1
        if asked is None:
            more = -(-left // equals)
            count, left, equals = count + more, left - more, equals - 1
        cpus = tuple(cpu for core in cores[start : start + count] for cpu in core)
        shares.append(CoreShare(cpus, count))
        start += count
    return tuple(shares)


def usable_cores() -> tuple[Core, ...]:
    """The physical cores that this process may use, in the order of their numbers."""
    try:
        usable = sorted(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity, and binds nobody to a core
        return tuple((cpu,) for cpu in range(os.cpu_count() or 1))
    cores: dict[str, list[int]] = {}
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings = path.read_text()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    return tuple(tuple(core) for core in cores.values())


def bind_to(cpus: Sequence[int]) -> None:
    """Keep this thread, and those that it will start, on these CPUs; none given: on any.

    Raises OSError if none of them can be used.
    """
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
