"""How fast blocks move, measured by `cache.bench_copies` in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.bench.module import json_of_module

_MODULE = "cache.bench_copies"


@dataclass(frozen=True, slots=True)
class Movement:
    """A way of moving blocks beside the plain way; bytes per second, payload only."""

    name: str
    plain_name: str
    rate: float
    plain_rate: float

    @property
    def share(self) -> float:
        """How much of the plain way's speed it reaches."""
        return self.rate / self.plain_rate


async def measure_movements(redis_urls: Sequence[str]) -> list[Movement]:
    """Device to DRAM and back, and to and from each Redis. Raises CampaignError."""
    addresses = [word for url in redis_urls for word in ("--redis", url)]
    return read_movements(await json_of_module(_MODULE, addresses))


def read_movements(found: dict[str, Any]) -> list[Movement]:
    """From what `cache.bench_copies --json` prints."""
    copies = found["copies"]
    movements = [
        Movement(name, "memcpy", copies[key], copies["plain"])
        for name, key in (
            ("device to DRAM, adjacent blocks", "download_adjacent"),
            ("device to DRAM, scattered blocks", "download_scattered"),
            ("DRAM to device, adjacent blocks", "upload_adjacent"),
            ("DRAM to device, scattered blocks", "upload_scattered"),
        )
    ]
    for one in found["redis"]:
        over = one["location"].partition(":")[0].replace("redis", "TCP")
        movements += [
            Movement(f"Redis {verb}, {over}", "redis-py", one[f"tier_{verb}"], one[f"plain_{verb}"])
            for verb in ("read", "write")
        ]
    return movements
