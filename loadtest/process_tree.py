"""What a server uses of the machine: its process and everything it started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")


def peak_rss_bytes(pid: int, proc: Path = _PROC) -> int | None:
    """The sum of the high-water marks of a process and its living descendants.

    Pages that several processes share count once for each, and the marks need not have been
    reached at one time: an upper bound for a tree, exact for a single process. None where the
    kernel does not tell (there is no /proc) or the process is gone.
    """
    return _sum_over([pid, *_descendants(pid, proc)], "VmHWM", proc)


def rss_bytes(pid: int, proc: Path = _PROC) -> int | None:
    """What one process has in memory now; None where the kernel does not tell or it is gone."""
    return _status_bytes(proc / str(pid), "VmRSS")


def descendants_rss_bytes(pid: int, proc: Path = _PROC) -> int | None:
    """What the living descendants of a process have in memory now; None if nothing is known."""
    return _sum_over(_descendants(pid, proc), "VmRSS", proc)


def cpu_seconds(pid: int, proc: Path = _PROC) -> float | None:
    """CPU time that a process and its living descendants have taken so far, in steps of a
    hundredth of a second, mostly; None where the kernel does not tell or the process is gone."""
    times = [_cpu_ticks(proc / str(one)) for one in [pid, *_descendants(pid, proc)]]
    if times[0] is None:
        return None
    return sum(ticks for ticks in times if ticks is not None) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int, proc: Path) -> list[int]:
    children: dict[int, list[int]] = {}
    for directory in proc.glob("[0-9]*"):
        if (parent := _parent(directory)) is not None:
            children.setdefault(parent, []).append(int(directory.name))
    found, waiting = [], [pid]
    while waiting:
        own = children.get(waiting.pop(), [])
        found += own
        waiting += own
    return found


def _sum_over(pids: Iterable[int], field: str, proc: Path) -> int | None:
    sizes = [_status_bytes(proc / str(pid), field) for pid in pids]
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def _parent(directory: Path) -> int | None:
    fields = _stat(directory)
    return None if fields is None else int(fields[1])


def _cpu_ticks(directory: Path) -> int | None:
    """In its own code and in the kernel for it, all threads; proc_pid_stat(5)."""
    fields = _stat(directory)
    return None if fields is None else int(fields[11]) + int(fields[12])


def _stat(directory: Path) -> list[str] | None:
    """What the kernel says of a process, from its state on."""
    try:
        stat = (directory / "stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold any character.
    return stat.rpartition(")")[2].split()


def _status_bytes(directory: Path, field: str) -> int | None:
    try:
        status = (directory / "status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
