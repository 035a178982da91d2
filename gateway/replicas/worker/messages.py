"""What gateway and worker say to each other, one message per frame.

The settings travel here and not as arguments or in the environment, where others could read them.
"""

from __future__ import annotations

import msgspec

from cache.block_events import BlockEvents
from cache.block_pool import Share
from cache.redis_options import RedisOptions
from cache.report import CacheStats, Erased
from engine.report import EngineStats, StepReport
from engine.request import EngineRequest
from gateway.replicas.engine_facts import EngineFacts


class CoreShare(msgspec.Struct, frozen=True, array_like=True):
    """What one worker computes with: `threads`, on `cpus` alone (none: wherever there is room)."""

    cpus: tuple[int, ...]
    threads: int


class Shares(msgspec.Struct, frozen=True, array_like=True):
    """Tenants' floors and quotas in blocks, and in bytes for Redis; see `Engine.set_shares`."""

    device: dict[bytes, Share]
    dram: dict[bytes, Share]
    redis: dict[bytes, int]


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The first message: load this model and serve it.

    `model` is the JSON of its `ModelSettings`. It is number `index` of `count` replicas that share
    the machine's GPUs. `redis` is where its KV may go, `shares` what the life before it had.
    """

    name: str
    model: bytes
    redis: RedisOptions | None
    index: int
    count: int
    cores: CoreShare
    shares: Shares | None
    log_level: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Start a request; its outputs come with the steps."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End a request; unknown ids are fine."""

    request_id: str


class Erase(msgspec.Struct, frozen=True, array_like=True, tag="erase"):
    """Remove an owner's blocks from every tier (`tenant` None: everybody's). Answered."""

    call: int
    tenant: bytes | None
    scope: bytes | None


class SetShares(msgspec.Struct, frozen=True, array_like=True, tag="shares"):
    """Put floors and quotas to use. Answered."""

    call: int
    shares: Shares


class TakeSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Tell everything that the tiers hold. Answered."""

    call: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The last message: abort what runs, save the cache, end."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """How far loading has come, in bytes."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded; requests are taken from now on. Comes before any `Step`."""

    facts: EngineFacts
    stats: EngineStats
    cache: CacheStats


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What one step of the engine brought."""

    report: StepReport


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The process lives, whatever its step loop does. Without `stats` it is still loading; `cache`
    comes when it has changed."""

    stats: EngineStats | None
    cache: CacheStats | None


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The outcome of the call of this number: an `error`, or what it was asked for."""

    call: int
    error: str | None = None
    erased: Erased | None = None
    events: BlockEvents | None = None


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The model cannot be served, for this reason; the process ends."""

    reason: str


ToWorker = Open | Submit | Abort | Erase | SetShares | TakeSnapshot | Stop
FromWorker = Progress | Ready | Step | Beat | Answer | Fatal
