"""What the load client can hold: many open streams at a steady pace, and what it adds to them.

    python -m loadtest.bench.client_capacity [--streams N] [--interval-ms MS] [--seconds S] [--json]

A paced server in a process of its own writes into each token when it was written; what lies between
that and the time stamp of its arrival is the way through the kernel and the client's own delay. It
is measured twice: with tokens spread evenly over the time, and with eight groups of streams whose
tokens come at once, as those of a full batch do. Both processes need a core to themselves.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass

import orjson
import uvloop

from loadtest.bench.campaign import CampaignError
from loadtest.live.client import run_load
from loadtest.live.stream import StreamReader
from loadtest.plan import Load, Session, Turn
from loadtest.server_process import running_module
from loadtest.stats.distribution import Distribution
from loadtest.tables import Table, number
from loadtest.target import Target
from loadtest.wire.connection import Endpoint

STREAMS = 2_000
INTERVAL_MS = 400.0
SECONDS = 25.0
EVEN_GROUPS = 400
"""A beat each millisecond of the interval: the timers know no less."""
BATCHES = 8
_PROMPT = tuple(range(256, 288))


@dataclass(frozen=True, slots=True)
class Pace:
    """So many streams that each get a token every `interval_ms` for `seconds`; those of one of the
    `groups` get it at once."""

    streams: int = STREAMS
    interval_ms: float = INTERVAL_MS
    seconds: float = SECONDS
    groups: int = EVEN_GROUPS

    @property
    def tokens(self) -> int:
        """Of each stream."""
        return max(2, round(self.seconds * 1e3 / self.interval_ms))


@dataclass(frozen=True, slots=True)
class CapacityFigures:
    """What the client held. `delay_*` is from a token's writing to its time stamp, `lag_*` how late
    the client's loop was. `load_1m` is the machine's load average after it: over two, and somebody
    else was at work."""

    streams: int
    groups: int
    most_open: int
    failed: int
    tokens: int
    tokens_per_s: float
    delay_p50_ms: float
    delay_p99_ms: float
    delay_max_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    cpu_share: float
    load_1m: float
    complaints: tuple[str, ...]


async def measure_capacity(pace: Pace) -> CapacityFigures:
    """One run. Raises CampaignError if nothing came."""
    readers: list[StreamReader] = []
    sessions = [Session((Turn(pace.tokens, tokens=_PROMPT),))] * pace.streams
    async with paced_server(pace) as endpoint:
        outcome = await run_load(
            Target("paced", endpoint, "paced", timeout_s=4 * pace.seconds + 60),
            Load("streams at a steady pace", sessions, concurrency=pace.streams),
            on_answer=lambda _, reader: readers.append(reader),
        )
    delays = Distribution.of(delay_ms for reader in readers for delay_ms in delays_ms(reader))
    if delays is None:
        raise CampaignError("no token came from the paced server")
    client = outcome.client
    return CapacityFigures(
        streams=pace.streams,
        groups=pace.groups,
        most_open=client.most_open,
        failed=sum(not record.ok for record in outcome.records),
        tokens=delays.count,
        tokens_per_s=delays.count / outcome.wall_s,
        delay_p50_ms=delays.p50,
        delay_p99_ms=delays.p99,
        delay_max_ms=delays.max,
        lag_p99_ms=client.lag_p99_s * 1e3,
        lag_max_ms=client.lag_max_s * 1e3,
        cpu_share=client.cpu_share,
        load_1m=os.getloadavg()[0],
        complaints=client.complaints,
    )


def delays_ms(reader: StreamReader) -> list[float]:
    """Of each token of an answer of the paced server, from its writing to its arrival."""
    written_s = map(float, reader.text.split())
    return [(at_s - token_s) * 1e3 for at_s, token_s in zip(reader.times_s, written_s, strict=True)]


def paced_server(pace: Pace) -> AbstractAsyncContextManager[Endpoint]:
    """One in a process of its own, killed at the end of the scope. Raises CampaignError."""
    return running_module(
        *("loadtest.paced_server", "the paced server"),
        *("--interval-ms", str(pace.interval_ms), "--groups", str(pace.groups)),
    )


def capacity_table(measured: Sequence[CapacityFigures]) -> Table:
    """A row for each run."""
    return Table(
        (
            *("streams", "at once", "failed", "tokens/s", "added p50 ms", "added p99 ms"),
            *("added max ms", "lag p99 ms", "CPU share", "load average"),
        ),
        tuple(
            (
                *(str(each.most_open), number(each.streams / each.groups), str(each.failed)),
                *(number(each.tokens_per_s), number(each.delay_p50_ms)),
                *(number(each.delay_p99_ms), number(each.delay_max_ms), number(each.lag_p99_ms)),
                *(number(each.cpu_share), number(each.load_1m)),
            )
            for each in measured
        ),
    )


async def _measure(streams: int, interval_ms: float, seconds: float) -> list[CapacityFigures]:
    return [
        await measure_capacity(Pace(streams, interval_ms, seconds, groups))
        for groups in (EVEN_GROUPS, BATCHES)
    ]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.client_capacity", description=__doc__
    )
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--interval-ms", type=float, default=INTERVAL_MS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    measured = uvloop.run(_measure(given.streams, given.interval_ms, given.seconds))
    if given.json:
        sys.stdout.write(orjson.dumps([asdict(each) for each in measured]).decode() + "\n")
        return
    lines = [capacity_table(measured).text()]
    lines += [f"the client: {complaint}" for each in measured for complaint in each.complaints]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
