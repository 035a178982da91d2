"""How much memory the directory takes, and how long telling it and asking it takes.

`python -m cache.bench_directory --json` prints one JSON object. A fleet tells of as many blocks as
are asked for, in conversations of different lengths that begin alike. Then prompts of one length
are looked up: that nobody knows, of which all know the beginning, that few know in part, that all
know whole, and that all know up to an end of their own, which is the worst that happens.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import ParamSpec

from cache.block import Tier
from cache.block_events import BlockEvents, TierChange
from cache.directory import Directory
from cache.hashing import CHAIN_BLOCK_TOKENS, HASH_BYTES

_SEED = 7
_BATCH_LINKS = 256
_SYSTEM_BLOCKS = 64
_PROMPTS_OF_A_KIND = 8
_SWEEP_BLOCKS = 1024
_HELD_TWICE = 0.2
_IN_REDIS = 0.2
_RESIDENT_PAGES = 1
_PAGE_BYTES = 4096

P = ParamSpec("P")
Links = list[bytes]


@dataclass(frozen=True, slots=True)
class Times:
    """Of one kind of prompt or of one kind of step, in microseconds of CPU time."""

    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class DirectoryRates:
    """`resident_bytes` is what the process grew by, per million blocks, their links among it;
    `estimated_bytes` what the directory says itself. `routed_us` is one prompt noted as sent to a
    replica that does not know it; `leave_us` the slowest replica's leaving; `sweep_ms` is all the
    sweeping after that, in steps of 1,024 blocks."""

    blocks: int
    replicas: int
    prompt_tokens: int
    resident_bytes: float
    estimated_bytes: float
    events_per_s: float
    cold: Times
    system_prompt: Times
    half_warm_on_few: Times
    warm_on_all: Times
    own_end_each: Times
    routed_us: float
    leave_us: float
    sweep_ms: float
    sweep_step: Times


class _Fleet:
    """Tells a directory of blocks in the name of many replicas."""

    def __init__(self, directory: Directory, replicas: int) -> None:
        self.names = [f"replica-{number}" for number in range(replicas)]
        self._directory = directory
        self._batches = dict.fromkeys(self.names, 0)
        for name in self.names:
            directory.join(name, shares_redis="redis")

    def tell(self, name: str, links: Links, tier: Tier = Tier.DEVICE) -> None:
        for start in range(0, len(links), _BATCH_LINKS):
            self._batches[name] += 1
            stored = tuple(links[start : start + _BATCH_LINKS])
            self._directory.apply(
                name, BlockEvents(1, self._batches[name], (TierChange(tier, stored),))
            )


def measure(*, blocks: int, replicas: int, prompt_tokens: int, lookups: int) -> DirectoryRates:
    """Everything, in a directory that comes to know about so many blocks."""
    draw = random.Random(_SEED)
    length = prompt_tokens // CHAIN_BLOCK_TOKENS
    gc.collect()
    before_bytes = _resident_bytes()
    directory = Directory(max_blocks=2 * blocks + 64 * length)
    fleet = _Fleet(directory, replicas)
    told = 0
    telling_s = 0.0
    system = _some_links(draw, _SYSTEM_BLOCKS)
    for name in fleet.names:
        fleet.tell(name, system)
    while directory.blocks < blocks:
        conversation = _some_links(draw, draw.randrange(16, 512))
        began_ns = time.thread_time_ns()
        for name in draw.sample(fleet.names, 1 + (draw.random() < _HELD_TWICE)):
            fleet.tell(name, conversation)
            told += len(conversation)
        if draw.random() < _IN_REDIS:
            fleet.tell(fleet.names[0], conversation, Tier.REDIS)
            told += len(conversation)
        telling_s += (time.thread_time_ns() - began_ns) / 1e9
    known = directory.blocks
    resident_bytes = _resident_bytes() - before_bytes
    estimated_bytes = directory.stats().bytes_estimate

    def few(prompt: Links) -> None:
        for name in draw.sample(fleet.names, min(4, replicas)):
            end = length // 2 + draw.randrange(-32, 32)
            fleet.tell(name, prompt[: end // 2])
            fleet.tell(name, prompt[end // 2 : end], Tier.DRAM)

    def everybody(prompt: Links) -> None:
        for name in fleet.names:
            fleet.tell(name, prompt)

    def own_end(prompt: Links) -> None:
        for name in fleet.names:
            fleet.tell(name, prompt[: draw.randrange(1, length)])

    def nobody(prompt: Links) -> None:
        pass

    def system_only(prompt: Links) -> None:
        prompt[: len(system)] = system[:length]

    def times(prepare: Callable[[Links], None]) -> Times:
        prompts = [_some_links(draw, length) for _ in range(_PROMPTS_OF_A_KIND)]
        for prompt in prompts:
            prepare(prompt)
        return _lookup_times(directory, prompts, lookups)

    cold = times(nobody)
    system_prompt = times(system_only)
    half_warm_on_few = times(few)
    warm_on_all = times(everybody)
    own_end_each = times(own_end)
    routed_us = min(
        _timed_us(directory.note_routed, name, _some_links(draw, length), 0.0)
        for name in fleet.names[:_PROMPTS_OF_A_KIND]
    )
    leave_us = max(_timed_us(directory.leave, name) for name in fleet.names)
    steps_us = list(_sweep_us(directory))
    return DirectoryRates(
        blocks=known,
        replicas=replicas,
        prompt_tokens=prompt_tokens,
        resident_bytes=resident_bytes * 1e6 / known,
        estimated_bytes=estimated_bytes * 1e6 / known,
        events_per_s=told / telling_s,
        cold=cold,
        system_prompt=system_prompt,
        half_warm_on_few=half_warm_on_few,
        warm_on_all=warm_on_all,
        own_end_each=own_end_each,
        routed_us=routed_us,
        leave_us=leave_us,
        sweep_ms=sum(steps_us) / 1e3,
        sweep_step=_quantiles(steps_us),
    )


def _some_links(draw: random.Random, count: int) -> Links:
    """Links of a chain: as evenly distributed as hashes are."""
    together = draw.randbytes(count * HASH_BYTES)
    return [together[start : start + HASH_BYTES] for start in range(0, len(together), HASH_BYTES)]


def _lookup_times(directory: Directory, prompts: Sequence[Links], lookups: int) -> Times:
    taken_us = []
    for turn in range(lookups):
        # links of their own, as those of a request are
        links = {
            CHAIN_BLOCK_TOKENS: [bytes(bytearray(link)) for link in prompts[turn % len(prompts)]]
        }
        taken_us.append(_timed_us(directory.lookup, links, 0.0))
    return _quantiles(taken_us)


def _quantiles(taken_us: Sequence[float]) -> Times:
    hundredths = statistics.quantiles(taken_us, n=100)
    return Times(p50_us=hundredths[49], p99_us=hundredths[98])


def _sweep_us(directory: Directory) -> Iterator[float]:
    """How long each step of sweeping everything takes."""
    while directory.stats().unswept_slots:
        yield _timed_us(directory.sweep, _SWEEP_BLOCKS)


def _timed_us(action: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> float:
    """CPU time: what other processes take of the machine is not the directory's."""
    began_ns = time.thread_time_ns()
    action(*args, **kwargs)
    return (time.thread_time_ns() - began_ns) / 1e3


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[_RESIDENT_PAGES]) * _PAGE_BYTES


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m cache.bench_directory", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument("--lookups", type=int, default=1000, help="of each kind of prompt")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    rates = asdict(
        measure(
            blocks=chosen.blocks,
            replicas=chosen.replicas,
            prompt_tokens=chosen.prompt_tokens,
            lookups=chosen.lookups,
        )
    )
    if chosen.json:
        sys.stdout.write(json.dumps(rates) + "\n")
        return 0
    for name, value in rates.items():
        if isinstance(value, dict):
            value = f"p50 {value['p50_us']:7.1f} µs   p99 {value['p99_us']:7.1f} µs"
        else:
            value = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
        sys.stdout.write(f"{name:<18} {value}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
