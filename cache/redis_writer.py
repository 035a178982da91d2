"""Stores on their way to Redis: a queue bounded in bytes, one connection, bounded pipelines."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from cache.block import BlockKey
from cache.envelope import Envelope
from cache.redis_census import Census, Holding
from cache.redis_client import Command
from cache.redis_link import Down, Lane, Late, RedisLink
from cache.redis_load import lengthening
from cache.redis_report import Question, Traffic

_log = logging.getLogger("forebay.cache")

PIECE_BYTES = 3 << 19
"""Values of one pipeline together, but always at least one: 1.5 MiB measured fastest."""

_PATIENCE_S = 1.0
"""Silence that a store may meet; nobody waits for it, so it is longer than the control timeout."""
_PIECE_S = 10.0
_REFUSED_PAUSE_S = 1.0
"""After Redis refused a store (full, read-only), the next ones are not sent for so long."""


def pieces(blocks: int, value_bytes: int, piece_bytes: int = PIECE_BYTES) -> Iterator[range]:
    """Indexes of `blocks` blocks, in pipelines of about `piece_bytes`."""
    step = max(1, piece_bytes // value_bytes)
    for first in range(0, blocks, step):
        yield range(first, min(first + step, blocks))


@dataclass(slots=True, eq=False)
class StoreJob:
    """One call's blocks: `slots` whole, header room first. `wanted` are the indexes still to be
    stored, each reserved in the census; `stored` the fates so far."""

    envelope: Envelope
    keys: Sequence[BlockKey]
    slots: Sequence[memoryview]
    ttl_s: float
    wanted: list[int]
    stored: list[bool]
    traffic: Traffic
    question: Question[tuple[bool, ...]]

    @property
    def size_bytes(self) -> int:
        return len(self.wanted) * self.envelope.value_bytes

    def holding(self, index: int) -> Holding:
        """What the census counts a block under."""
        return Holding(self.envelope.identity_name, self.keys[index].owner.tenant)


class RedisWriter:
    """`take_room` and `give_room` are for any thread, all else for the loop's."""

    def __init__(self, link: RedisLink, census: Census, queue_bytes: int) -> None:
        self._link = link
        self._census = census
        self._queue_bytes = queue_bytes
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._jobs: deque[StoreJob] = deque()
        self._news = asyncio.Event()
        self._refused_until_s = 0.0
        self.between_pieces = asyncio.Lock()
        """Held while a piece is being written, and by who changes which blocks are wanted."""

    def take_room(self, size_bytes: int) -> bool:
        """Reserve room in the queue; given back when the job that took it is done."""
        with self._lock:
            if self._queued_bytes + size_bytes > self._queue_bytes:
                return False
            self._queued_bytes += size_bytes
            return True

    def give_room(self, size_bytes: int) -> None:
        with self._lock:
            self._queued_bytes -= size_bytes

    def add(self, job: StoreJob) -> None:
        self._jobs.append(job)
        self._news.set()

    def drop_owner(self, envelope: Envelope, tenant: bytes | None, scope: bytes | None) -> None:
        """Leave out an owner's blocks (of every envelope), or with `tenant` None every block of
        `envelope`'s identity, from what is not yet stored. The caller holds `between_pieces`."""
        for job in self._jobs:
            self._leave_out(job, envelope, tenant, scope)

    async def run(self) -> None:
        """Write what comes, in order. Runs until cancelled."""
        while True:
            while not self._jobs:
                self._news.clear()
                await self._news.wait()
            # It stays in the queue while it is written, so that an erasure finds its later pieces.
            job = self._jobs[0]
            try:
                await self._write(job)
            except Exception:  # noqa: BLE001  # one job's fault must not end the others
                _log.exception("a store to Redis failed")
            finally:
                self._jobs.popleft()
                self._end(job)

    async def _write(self, job: StoreJob) -> None:
        for piece in pieces(len(job.keys), job.envelope.value_bytes):
            async with self.between_pieces:
                indexes = [index for index in piece if index in job.wanted]
                if not indexes or job.question.settled:
                    continue
                if asyncio.get_running_loop().time() < self._refused_until_s:
                    job.traffic.drop("refused", len(job.wanted))
                    self._forgo(job, list(job.wanted))
                    return
                try:
                    await self._write_piece(job, indexes)
                except (Down, Late):
                    job.traffic.drop("error", len(job.wanted))
                    self._forgo(job, list(job.wanted))
                    return

    async def _write_piece(self, job: StoreJob, indexes: Sequence[int]) -> None:
        """Write these blocks. One that is there already stays, with the longer of both lives: who
        stored it may have been asked to keep it for longer than this process knows."""
        there = await self._set(job, indexes, only_new=True)
        if not there:
            return
        commands: list[Command] = [
            lengthening(
                job.envelope.key_of(job.keys[index]),
                job.envelope.value_bytes,
                math.ceil(job.ttl_s),
            )
            for index in there
        ]
        gone: list[int] = []
        for index, reply in zip(there, await self._ask(commands), strict=True):
            if isinstance(reply, ResponseError):
                self._refused(job, index)
            elif reply:
                self._census.give_back(job.holding(index), job.envelope.value_bytes)
                self._is_stored(job, index)
            else:
                gone.append(index)
        if gone:
            await self._set(job, gone, only_new=False)

    async def _set(self, job: StoreJob, indexes: Sequence[int], *, only_new: bool) -> list[int]:
        """Send these blocks. With `only_new` those whose key exists stay as they are: they are
        returned."""
        condition = ("NX",) if only_new else ()
        commands: list[Command] = [
            (
                "SET",
                job.envelope.key_of(job.keys[index]),
                job.envelope.wrap(job.keys[index], job.slots[index]),
                "EX",
                math.ceil(job.ttl_s),
                *condition,
            )
            for index in indexes
        ]
        there: list[int] = []
        for index, reply in zip(indexes, await self._ask(commands), strict=True):
            if isinstance(reply, ResponseError):
                self._refused(job, index)
            elif reply is None:
                there.append(index)
            else:
                self._census.stored(job.holding(index), job.envelope.value_bytes)
                self._is_stored(job, index)
        return there

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        """The replies. Raises Late or Down."""
        until_s = asyncio.get_running_loop().time() + _PIECE_S
        return await self._link.ask(Lane.STORE, commands, until_s, patience_s=_PATIENCE_S)

    def _is_stored(self, job: StoreJob, index: int) -> None:
        job.wanted.remove(index)
        job.stored[index] = True
        job.traffic.stored(1)

    def _refused(self, job: StoreJob, index: int) -> None:
        job.traffic.drop("refused")
        self._forgo(job, [index])
        self._refused_until_s = asyncio.get_running_loop().time() + _REFUSED_PAUSE_S

    def _leave_out(
        self, job: StoreJob, envelope: Envelope, tenant: bytes | None, scope: bytes | None
    ) -> None:
        same_identity = job.envelope.identity_digest == envelope.identity_digest
        gone = [
            index
            for index in job.wanted
            if (same_identity if tenant is None else job.keys[index].owner.tenant == tenant)
            and (scope is None or job.keys[index].owner.scope == scope)
        ]
        self._forgo(job, gone)

    def _forgo(self, job: StoreJob, indexes: Sequence[int]) -> None:
        for index in indexes:
            job.wanted.remove(index)
            self._census.give_back(job.holding(index), job.envelope.value_bytes)

    def _end(self, job: StoreJob) -> None:
        self._forgo(job, list(job.wanted))
        self.give_room(len(job.keys) * job.envelope.value_bytes)
        job.question.answer(tuple(job.stored))
