"""From an executor and a budget to the prompt cache of its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cache.block_pool import BlockPool
from cache.copier import make_copier
from cache.envelope import Envelope, header_bytes
from cache.host_arena import HostArena
from cache.identity import CacheIdentity
from cache.redis_store import RedisStore, RedisTier
from cache.sightings import Sightings
from cache.tiered_cache import TieredCache
from cache.tiers import DramTier, Tiers
from engine.calibration import calibrate
from engine.errors import ModelLoadError
from engine.executors.base import Executor
from engine.hardware import memory_bytes
from policies.cost import CostModel
from policies.eviction import most_kept
from policies.tiering import remembered_blocks

_log = logging.getLogger("forebay.engine")

_LANDING_SEQUENCES = 2
"""Without a DRAM tier, blocks from Redis land in slots for so many of the longest sequences."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The lower tiers of one engine. `dram_bytes` 0: none, and Redis only has a landing place.

    `ahead_tokens` are pages whose content is copied down before they are needed: at least what two
    steps take.
    """

    dram_bytes: int = 0
    redis: RedisStore | None = None
    write_through: bool = False
    ahead_tokens: int = 512
    max_context: int = 2048


def device_only(executor: Executor, wake: Callable[[], None]) -> TieredCache:
    """Device pages and nothing below them."""
    return _open(executor, wake, _generic_cost(executor), None, None, CacheOptions())


def measure_cost(
    executor: Executor, parameters: int, *, step_tokens: int, max_context: int
) -> CostModel:
    """What the steps of a model of so many parameters cost here. Takes a good part of a second, on
    pages that hold nothing yet."""
    block_bytes = int(executor.pages.shape[1])
    cost = CostModel(
        token_flops=2.0 * parameters,
        weight_bytes=float(parameters * executor.dtype.itemsize),
        kv_token_bytes=block_bytes / executor.block_tokens,
        block_bytes=block_bytes,
        step_tokens=step_tokens,
    )
    calibrate(executor, cost, step_tokens=step_tokens, max_context=max_context)
    return cost


def tiers_opener(
    cost: CostModel, identity: CacheIdentity, options: CacheOptions
) -> Callable[[Executor, Callable[[], None]], TieredCache]:
    """Opens the tiers for an executor.

    What it returns raises ModelLoadError if the DRAM budget is more than the machine has or less
    than one block.
    """

    def open_cache(executor: Executor, wake: Callable[[], None]) -> TieredCache:
        dram = _open_dram(executor, options)
        redis = None
        if options.redis is not None:
            redis = options.redis.tier(
                Envelope(
                    identity.digest(),
                    executor.block_tokens,
                    int(executor.pages.shape[1]),
                    identity.kv_dtype,
                    options.redis.sealer(),
                )
            )
        return _open(executor, wake, cost, dram, redis, options)

    return open_cache


def _open_dram(executor: Executor, options: CacheOptions) -> DramTier | None:
    """The slots, as many as the budget has; without a budget those that Redis needs to land."""
    block_bytes = int(executor.pages.shape[1])
    header = header_bytes(executor.block_tokens)
    slots = options.dram_bytes // (header + block_bytes)
    if options.dram_bytes:
        memory = memory_bytes(torch.device("cpu"))
        if options.dram_bytes > memory:
            raise ModelLoadError(
                f"cache.dram of {options.dram_bytes} bytes is more than the {memory} bytes of "
                f"memory that this machine has"
            )
        if not slots:
            raise ModelLoadError(
                f"cache.dram of {options.dram_bytes} bytes is smaller than one block of "
                f"{header + block_bytes} bytes"
            )
    elif options.redis is not None:
        slots = _LANDING_SEQUENCES * -(-options.max_context // executor.block_tokens)
    else:
        return None
    pinned = executor.device.type == "cuda"
    try:
        arena = HostArena(slots, block_bytes, header_bytes=header, pinned=pinned)
    except MemoryError as error:
        _log.warning("the DRAM tier is not page-locked, its copies are slower: %s", error)
        arena = HostArena(slots, block_bytes, header_bytes=header, pinned=False)
    return DramTier(
        pool=BlockPool(slots, keep_at_most=most_kept(slots)),
        arena=arena,
        copier=make_copier(executor.pages, arena),
        keeps=options.dram_bytes > 0,
    )


def _open(
    executor: Executor,
    wake: Callable[[], None],
    cost: CostModel,
    dram: DramTier | None,
    redis: RedisTier | None,
    options: CacheOptions,
) -> TieredCache:
    pages = int(executor.pages.shape[0])
    slots = dram.capacity if dram is not None and dram.keeps else 0
    tiers = Tiers(
        BlockPool(pages, keep_at_most=most_kept(pages)),
        dram,
        redis,
        cost=cost,
        sightings=Sightings(remembered_blocks(pages + slots)),
        block_tokens=executor.block_tokens,
        block_bytes=int(executor.pages.shape[1]),
        copy_page=lambda source, target: _copy_page(executor.pages, source, target),
        wake=wake,
    )
    return TieredCache(
        tiers,
        ahead=max(1, -(-options.ahead_tokens // executor.block_tokens)),
        write_through=options.write_through,
    )


def _copy_page(pages: torch.Tensor, source: int, target: int) -> None:
    pages[target].copy_(pages[source])


def _generic_cost(executor: Executor) -> CostModel:
    """For an engine that nobody described: what it costs is learned as it runs."""
    block_bytes = int(executor.pages.shape[1])
    return CostModel(
        token_flops=2e8,
        weight_bytes=2e8,
        kv_token_bytes=block_bytes / executor.block_tokens,
        block_bytes=block_bytes,
    )
