"""How fast the tiers move blocks, beside what the machine and the client library do by themselves.

`python -m cache.bench_copies --json` prints one JSON object. Rates are bytes per second, payload
only. Plain and tiered copies alternate, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

import redis
import torch

from cache.block import BlockKey
from cache.copier import Done, make_copier
from cache.envelope import Envelope
from cache.hashing import HASH_BYTES
from cache.host_arena import HostArena
from cache.host_memory import PageMemory
from cache.redis_options import RedisOptions
from cache.redis_report import Fetched
from cache.redis_server import SECRET_CHECK_KEY
from cache.redis_store import RedisStore
from cache.redis_tier import RedisTier

_SEED = 7
_BLOCK_TOKENS = 16
_REDIS_S = 10.0

Moves = Sequence[tuple[int, int]]
Transfer = Callable[[Moves, Done], None]


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Best of the repeats. `plain` is one copy of all blocks at once; the others move blocks
    between pages and slots that are adjacent, or scattered at random."""

    plain: float
    download_adjacent: float
    download_scattered: float
    upload_adjacent: float
    upload_scattered: float


def measure_copies(
    device: torch.device, *, blocks: int, block_bytes: int, repeats: int
) -> CopyRates:
    """Copies between `blocks` pages on `device` and as many slots, against a plain copy."""
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device")
    if cuda:
        pages = torch.ones(blocks, block_bytes, dtype=torch.uint8, device=device)
        beside = torch.ones(blocks, block_bytes, dtype=torch.uint8, pin_memory=True)
    else:
        memory, other = PageMemory(blocks, block_bytes), PageMemory(blocks, block_bytes)
        memory.wait_resident()
        other.wait_resident()
        pages, beside = memory.pages, other.pages
    adjacent = [(block, block) for block in range(blocks)]
    draw = random.Random(_SEED)
    scattered = list(
        zip(draw.sample(range(blocks), blocks), draw.sample(range(blocks), blocks), strict=True)
    )
    arena = HostArena(blocks, block_bytes, header_bytes=64, pinned=cuda)
    with closing(arena), closing(make_copier(pages, arena)) as copier:
        arena.payloads.fill_(1)
        ways: dict[str, Callable[[], float]] = {
            "plain": lambda: _plain_copy_s(pages, beside),
            "download_adjacent": lambda: _transfer_s(copier.download, adjacent),
            "download_scattered": lambda: _transfer_s(copier.download, scattered),
            "upload_adjacent": lambda: _transfer_s(copier.upload, adjacent),
            "upload_scattered": lambda: _transfer_s(copier.upload, scattered),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(repeats):
            for name, way in ways.items():
                best[name] = min(best[name], way())
    return CopyRates(**{name: blocks * block_bytes / seconds for name, seconds in best.items()})


def _plain_copy_s(pages: torch.Tensor, beside: torch.Tensor) -> float:
    began = time.perf_counter()
    if pages.device.type == "cuda":
        beside.copy_(pages, non_blocking=True)
        torch.cuda.synchronize(pages.device)
    else:
        ctypes.memmove(beside.data_ptr(), pages.data_ptr(), pages.nbytes)
    return time.perf_counter() - began


def _transfer_s(transfer: Transfer, moves: Moves) -> float:
    """Wall time from asking for the transfer to hearing of its end."""
    over = threading.Event()
    outcome: list[float | None] = []

    def done(seconds: float | None) -> None:
        outcome.append(seconds)
        over.set()

    began = time.perf_counter()
    transfer(moves, done)
    over.wait()
    elapsed = time.perf_counter() - began
    if outcome[0] is None:
        raise RuntimeError("a copy failed")
    return elapsed


@dataclass(frozen=True, slots=True)
class RedisRates:
    """Best of the repeats, over one connection for the plain client, which reads and writes in a
    pipeline or value by value, whichever is faster."""

    location: str
    plain_read: float
    plain_write: float
    tier_read: float
    tier_write: float


def measure_redis(url: str, *, blocks: int, block_bytes: int, repeats: int) -> RedisRates:
    """Blocks through the Redis tier, against as many values of the same size through redis-py.

    Raises RuntimeError if the server at `url` does not answer or does not take the blocks.
    """
    options = RedisOptions(url=url, secret=b"bench", max_connections=4)
    envelope = Envelope(bytes(32), _BLOCK_TOKENS, block_bytes, "uint8")
    arena = HostArena(blocks, block_bytes, header_bytes=envelope.header_bytes, pinned=False)
    arena.payloads.random_()
    keys = [_block_key(block) for block in range(blocks)]
    slots = list(zip(keys, (arena.value(slot) for slot in range(blocks)), strict=True))
    landing = list(zip(keys, (arena.payload(slot) for slot in range(blocks)), strict=True))
    values = {
        f"forebay-bench:{slot}": bytes(arena.value(slot)) for slot in range(blocks)
    }  # the same bytes under keys that no tier reads
    store = RedisStore(options)
    with closing(store), closing(redis.Redis.from_url(url)) as client:
        in_use = client.exists(SECRET_CHECK_KEY)
        store.start()
        if not store.wait_settled(_REDIS_S):
            raise RuntimeError(f"{options.location}: no answer")
        tier = store.tier(envelope)
        ways: dict[str, Callable[[], float]] = {
            "plain_write": lambda: min(_set_s(client, values), _set_pipelined_s(client, values)),
            "plain_read": lambda: min(_get_s(client, values), _get_pipelined_s(client, values)),
            "tier_write": lambda: _store_s(tier, slots),
            "tier_read": lambda: _fetch_s(tier, landing),
        }
        try:
            best = dict.fromkeys(ways, float("inf"))
            for _ in range(repeats):
                for name, way in ways.items():
                    best[name] = min(best[name], way())
        finally:
            client.delete(*values)
            tier.erase(None).result(_REDIS_S)
            if not in_use:
                client.delete(SECRET_CHECK_KEY)  # else no gateway with a secret of its own could
    rates = {name: blocks * block_bytes / seconds for name, seconds in best.items()}
    return RedisRates(location=options.location, **rates)


def _block_key(number: int) -> BlockKey:
    link = number.to_bytes(HASH_BYTES, "little")
    return BlockKey(link, bytes(HASH_BYTES), bytes(4 * _BLOCK_TOKENS))


def _set_s(client: redis.Redis, values: Mapping[str, bytes]) -> float:
    client.delete(*values)  # new keys, as the tier writes them
    began = time.perf_counter()
    for key, value in values.items():
        client.set(key, value)
    return time.perf_counter() - began


def _set_pipelined_s(client: redis.Redis, values: Mapping[str, bytes]) -> float:
    client.delete(*values)
    began = time.perf_counter()
    pipeline = client.pipeline(transaction=False)
    for key, value in values.items():
        pipeline.set(key, value)
    pipeline.execute()
    return time.perf_counter() - began


def _get_s(client: redis.Redis, values: Mapping[str, bytes]) -> float:
    began = time.perf_counter()
    for key in values:
        client.get(key)
    return time.perf_counter() - began


def _get_pipelined_s(client: redis.Redis, values: Mapping[str, bytes]) -> float:
    began = time.perf_counter()
    pipeline = client.pipeline(transaction=False)
    for key in values:
        pipeline.get(key)
    pipeline.execute()
    return time.perf_counter() - began


def _store_s(tier: RedisTier, slots: Sequence[tuple[BlockKey, memoryview]]) -> float:
    tier.erase(None).result(_REDIS_S)  # what is there already would not be written
    over = threading.Event()
    outcome: list[tuple[bool, ...]] = []

    def done(stored: tuple[bool, ...]) -> None:
        outcome.append(stored)
        over.set()

    began = time.perf_counter()
    if not tier.store(slots, done):
        raise RuntimeError("the Redis tier refused the blocks")
    over.wait()
    elapsed = time.perf_counter() - began
    if not all(outcome[0]):
        raise RuntimeError("the Redis tier did not store every block")
    return elapsed


def _fetch_s(tier: RedisTier, landing: Sequence[tuple[BlockKey, memoryview]]) -> float:
    over = threading.Event()
    outcome: list[Fetched] = []

    def done(fetched: Fetched) -> None:
        outcome.append(fetched)
        over.set()

    began = time.perf_counter()
    tier.fetch(landing, _REDIS_S, done)
    over.wait()
    elapsed = time.perf_counter() - began
    if any(miss is not None for miss in outcome[0].outcomes):
        raise RuntimeError("the Redis tier did not bring every block")
    return elapsed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns 1 with one line on standard error if something cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m cache.bench_copies", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the pages are"
    )
    parser.add_argument("--redis", action="append", default=[], metavar="URL", help="repeatable")
    parser.add_argument("--blocks", type=int, default=256, help="blocks of one copy")
    parser.add_argument("--redis-blocks", type=int, default=64, help="values of one transfer")
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    try:
        copies = measure_copies(
            torch.device(chosen.device),
            blocks=chosen.blocks,
            block_bytes=chosen.block_bytes,
            repeats=chosen.repeats,
        )
        over_redis = [
            measure_redis(
                url,
                blocks=chosen.redis_blocks,
                block_bytes=chosen.block_bytes,
                repeats=chosen.repeats,
            )
            for url in chosen.redis
        ]
    except (RuntimeError, ValueError, redis.RedisError) as error:
        sys.stderr.write(f"bench_copies: {error}\n")
        return 1
    if chosen.json:
        found = {"copies": asdict(copies), "redis": [asdict(one) for one in over_redis]}
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    for name, rate in asdict(copies).items():
        sys.stdout.write(f"{chosen.device} {name}: {rate / 1e9:.2f} GB/s\n")
    for one in over_redis:
        for name in ("plain_read", "tier_read", "plain_write", "tier_write"):
            sys.stdout.write(f"{one.location} {name}: {getattr(one, name) / 1e9:.2f} GB/s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
