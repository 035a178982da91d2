"""How much memory a server uses, or used at most: its process and everything it started."""

from __future__ import annotations

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
    try:
        stat = (directory / "stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold any character.
    return int(stat.rpartition(")")[2].split()[1])


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
