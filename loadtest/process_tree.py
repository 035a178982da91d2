"""How much memory a server used at most: its process and everything it started."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")


def peak_rss_bytes(pid: int, proc: Path = _PROC) -> int | None:
    """The sum of the high-water marks of a process and its living descendants.

    Pages that several processes share count once for each, and the marks need not have been
    reached at one time: an upper bound for a tree, exact for a single process. None where the
    kernel does not tell (there is no /proc) or the process is gone.
    """
    children: dict[int, list[int]] = {}
    for directory in proc.glob("[0-9]*"):
        if (parent := _parent(directory)) is not None:
            children.setdefault(parent, []).append(int(directory.name))
    total: int | None = None
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        if (mark := _high_water_bytes(proc / str(process))) is not None:
            total = (total or 0) + mark
    return total


def _parent(directory: Path) -> int | None:
    try:
        stat = (directory / "stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold any character.
    return int(stat.rpartition(")")[2].split()[1])


def _high_water_bytes(directory: Path) -> int | None:
    try:
        status = (directory / "status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return None
