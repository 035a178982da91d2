"""One model's view of Redis: which blocks are there, bring these, keep those, forget whose.

Nothing here waits: every question is handed to the store's thread, and its callback is called
exactly once, there, or at once on the caller's thread when the answer is already known. Callbacks
must be cheap.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from redis.exceptions import ResponseError

from cache.block import BlockKey
from cache.envelope import Envelope, owner_pattern
from cache.redis_census import Census, Holding
from cache.redis_client import Command
from cache.redis_link import Down, Lane, Late, RedisLink
from cache.redis_load import Load, deletion, deletion_unless_sized, is_other_type
from cache.redis_report import Book, Fetched, Probe, Question, RedisCounters, Traffic
from cache.redis_writer import RedisWriter, StoreJob, pieces
from cache.report import Miss

_BACKGROUND_S = 2.0
"""Time for a command that nobody waits for."""

_PROBE_KEYS = 1024
"""Most keys of one round trip: about 10 ms of work, well within the control timeout."""
_LOAD_PIECE_BYTES = 6 << 20
"""A prompt waits for a load: longer pipelines than a store's, which makes way for others."""

Work = Callable[[], Coroutine[Any, Any, None]]


class RedisDown(Exception):
    """Redis could not be asked to erase, or stopped answering before it was done."""


class Runner(Protocol):
    """The store's thread."""

    def run(self, work: Work, question: Question[Any]) -> None:
        """Run `work` on the loop; whatever becomes of it, `question` is settled then."""
        ...

    def call(self, function: Callable[[], None], question: Question[Any]) -> None:
        """Call `function` on the loop, or lose `question` if there is none any more."""
        ...

    def count_anew(self) -> None:
        """Have the census counted soon. On the loop only."""
        ...


class RedisTier:
    """See the module. All methods are thread-safe; made by `RedisStore.tier`."""

    def __init__(
        self,
        envelope: Envelope,
        link: RedisLink,
        writer: RedisWriter,
        census: Census,
        runner: Runner,
        book: Book,
        *,
        ttl_s: float,
        max_value_bytes: int,
    ) -> None:
        self.envelope = envelope
        self._link = link
        self._writer = writer
        self._census = census
        self._runner = runner
        self._book = book
        self._ttl_s = ttl_s
        self._max_value_bytes = max_value_bytes
        self._traffic = Traffic()
        self._discards: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> bool:
        """Whether questions go to Redis; if not, they are answered at once."""
        return self._link.up

    @property
    def server_lives(self) -> int:
        """Grows when Redis may have been started anew, and hold nothing of what was stored."""
        return self._link.server_lives

    @property
    def ttl_s(self) -> float:
        """How long blocks live that are stored without a wish."""
        return self._ttl_s

    def probe(self, keys: Sequence[BlockKey], done: Callable[[Probe], None]) -> None:
        """Ask which of `keys` Redis has, as values of the right size, in one round trip (in several
        for very many keys), within the control timeout. What has another size is deleted."""
        question = Question(done, lambda: Probe(failed=Miss.TIER_DOWN), self._book)
        if not keys:
            question.answer(Probe())
        elif not self.up:
            question.lose()
        else:
            self._runner.run(lambda: self._probe(question, list(keys)), question)

    def fetch(
        self,
        blocks: Sequence[tuple[BlockKey, memoryview]],
        deadline_s: float,
        done: Callable[[Fetched], None],
        part: Callable[[int], None] | None = None,
    ) -> None:
        """Bring the payload of each block into its buffer (`payload_bytes` long), verified.

        When `deadline_s` has passed, what has arrived counts, the rest is LATE.
        `part` hears how many blocks from the first on are loaded, as that grows. After `done` has
        been called nothing writes into the buffers any more; a buffer whose block was not loaded
        may hold anything. Damaged and foreign values are deleted from Redis. Raises ValueError for
        a buffer of another size.
        """
        for _, buffer in blocks:
            if len(buffer) != self.envelope.payload_bytes:
                raise ValueError(f"buffer: {len(buffer)} bytes, not {self.envelope.payload_bytes}")
        lost = (Miss.TIER_DOWN,) * len(blocks)

        def count_and_finish(fetched: Fetched) -> None:
            self._traffic.fetched(fetched.outcomes, fetched.seconds)
            done(fetched)

        question = Question(count_and_finish, lambda: Fetched(lost, 0.0), self._book)
        if not blocks or not self.up:
            question.lose()
            return
        load = Load(self.envelope, list(blocks), question, part)
        self._runner.run(lambda: self._fetch(load, deadline_s), question)

    def store(
        self,
        blocks: Sequence[tuple[BlockKey, memoryview]],
        done: Callable[[tuple[bool, ...]], None],
        ttl_s: float | None = None,
    ) -> bool:
        """Write blocks to Redis, to live for `ttl_s` (the store's default if None). Each buffer is
        a whole slot, header room first; its header is filled in here, and nobody else may change
        the slot until `done` is called with each block's fate.

        False if nothing of it can be done, which is counted, and then `done` is not called. Raises
        ValueError for a slot of another size.
        """
        for _, slot in blocks:
            if len(slot) != self.envelope.slot_bytes:
                raise ValueError(f"slot: {len(slot)} bytes, not {self.envelope.slot_bytes}")
        size_bytes, name = self.envelope.value_bytes, self.envelope.identity_name
        if not blocks:
            return False
        if size_bytes > self._max_value_bytes:
            return self._refuse("too_big", len(blocks))
        if not self.up:
            return self._refuse("error", len(blocks))
        if not self._writer.take_room(len(blocks) * size_bytes):
            return self._refuse("busy", len(blocks))
        wanted = [
            index
            for index, (key, _) in enumerate(blocks)
            if self._census.reserve(Holding(name, key.owner.tenant), size_bytes)
        ]
        if not wanted:
            self._writer.give_room(len(blocks) * size_bytes)
            return self._refuse("quota", len(blocks))
        self._traffic.drop("quota", len(blocks) - len(wanted))
        job = StoreJob(
            envelope=self.envelope,
            keys=[key for key, _ in blocks],
            slots=[slot for _, slot in blocks],
            ttl_s=self._ttl_s if ttl_s is None else ttl_s,
            wanted=wanted,
            stored=[False] * len(blocks),
            traffic=self._traffic,
            question=Question(done, lambda: (False,) * len(blocks), self._book),
        )
        self._runner.call(lambda: self._writer.add(job), job.question)
        return True

    def erase(
        self, tenant: bytes | None, scope: bytes | None = None
    ) -> concurrent.futures.Future[int]:
        """Delete an owner's blocks of every identity (`scope` None: of all its scopes), or with
        `tenant` None every block of this identity; gives the number of keys deleted.

        Blocks still waiting to be stored are not stored any more. The future raises RedisDown if
        Redis could not be asked or did not answer to the end.
        """
        if tenant is None and scope is not None:
            raise ValueError("scope: needs a tenant")
        future: concurrent.futures.Future[int] = concurrent.futures.Future()

        def finish(erased: int | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if erased is None:
                future.set_exception(RedisDown("Redis did not answer"))
            else:
                future.set_result(erased)

        question: Question[int | None] = Question(finish, lambda: None, self._book)
        if self.up:
            self._runner.run(lambda: self._erase(question, tenant, scope), question)
        else:
            question.lose()
        return future

    def set_quotas(self, quotas: Mapping[bytes, int]) -> None:
        """The most bytes by tenant tag, for all models and hosts together; approximate: a process
        learns of the others' stores from a count every half minute."""
        self._census.set_quotas(quotas)

    def stats(self) -> RedisCounters:
        traffic = self._traffic
        with traffic.lock:
            return RedisCounters(
                hits=traffic.hits,
                misses=dict(traffic.misses),
                stores=traffic.stores,
                dropped=dict(traffic.dropped),
                load_s=traffic.load_s,
                loaded_bytes=traffic.hits * self.envelope.payload_bytes,
                stored_bytes=traffic.stores * self.envelope.value_bytes,
                census_bytes=self._census.by_tenant(self.envelope.identity_name),
                up=self.up,
                times_opened=self._link.times_opened,
                server_version=self._link.facts.version,
                maxmemory_policy=self._link.facts.maxmemory_policy,
            )

    def _refuse(self, reason: str, blocks: int) -> bool:
        self._traffic.drop(reason, blocks)
        return False

    async def _probe(self, question: Question[Probe], keys: Sequence[BlockKey]) -> None:
        commands: list[Command] = [("STRLEN", self.envelope.key_of(key)) for key in keys]
        sizes: list[Any] = []
        try:
            for first in range(0, len(commands), _PROBE_KEYS):
                sizes += await self._link.ask_control(commands[first : first + _PROBE_KEYS])
        except Late:
            question.answer(Probe(failed=Miss.LATE))
            return
        except Down:
            question.answer(Probe(failed=Miss.TIER_DOWN))
            return
        for size in sizes:
            if isinstance(size, ResponseError) and not is_other_type(size):
                self._link.trouble(size)
                question.answer(Probe(failed=Miss.TIER_DOWN))
                return
        value_bytes = self.envelope.value_bytes
        wrong = [index for index, size in enumerate(sizes) if size not in (0, value_bytes)]
        if wrong:
            self._discard([deletion_unless_sized(commands[i][1], value_bytes) for i in wrong])
        foreign = frozenset(i for i in wrong if sizes[i] == self.envelope.other_value_bytes)
        present = tuple(size == value_bytes for size in sizes)
        question.answer(Probe(present, frozenset(wrong) - foreign, foreign))

    async def _fetch(self, load: Load, deadline_s: float) -> None:
        """Piece by piece over one connection: more at a time only compete for this thread."""
        started_s = time.perf_counter()  # the loop's own clock counts milliseconds
        until_s = asyncio.get_running_loop().time() + deadline_s
        try:
            for piece in pieces(len(load.blocks), self.envelope.value_bytes, _LOAD_PIECE_BYTES):
                await self._fetch_piece(load, piece, until_s)
        except (Late, Down) as problem:
            load.reason = Miss.LATE if isinstance(problem, Late) else Miss.TIER_DOWN
        load.finish(time.perf_counter() - started_s)

    async def _fetch_piece(self, load: Load, piece: range, until_s: float) -> None:
        """Raises Late or Down if it did not arrive."""
        commands: list[Command] = [
            ("GET", self.envelope.key_of(load.blocks[index][0])) for index in piece
        ]
        bad: list[Command] = []
        refusals: list[ResponseError] = []

        def take(value: Any) -> None:
            if isinstance(value, ResponseError) and not is_other_type(value):
                refusals.append(value)
            elif not refusals:
                key = commands[load.position - piece.start][1]
                if load.take(value) in (Miss.CORRUPT, Miss.FOREIGN):
                    bad.append(deletion(key, value))

        try:
            await self._link.stream(Lane.LOAD, commands, until_s, take)
        finally:
            if bad:
                self._discard(bad)
        if refusals:
            self._link.trouble(refusals[0])
            raise Down("refused")

    def _discard(self, deletions: Sequence[Command]) -> None:
        """Delete bad values, unless they have been replaced meanwhile; if that fails they are met
        again."""

        loop = asyncio.get_running_loop()

        async def discard() -> None:
            try:
                await self._link.ask(
                    Lane.STORE, deletions, loop.time() + _BACKGROUND_S, patience_s=_BACKGROUND_S
                )
            except (Down, Late):
                return

        task = loop.create_task(discard())
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)

    async def _erase(
        self, question: Question[int | None], tenant: bytes | None, scope: bytes | None
    ) -> None:
        async with self._writer.between_pieces:
            self._writer.drop_owner(self.envelope, tenant, scope)
        pattern = (
            self.envelope.key_prefix + b"*" if tenant is None else owner_pattern(tenant, scope)
        )
        loop = asyncio.get_running_loop()
        erased = 0
        try:
            async for keys in self._link.scan(pattern):
                if keys:
                    unlinks: list[Command] = [("UNLINK", key) for key in keys]
                    replies = await self._link.ask(
                        Lane.STORE,
                        unlinks,
                        loop.time() + _BACKGROUND_S,
                        patience_s=_BACKGROUND_S,
                    )
                    for reply in replies:
                        if isinstance(reply, ResponseError):
                            raise Down("refused")
                        erased += reply
        except (Down, Late):
            question.lose()
            return
        if tenant is None:
            self._census.forget(identity=self.envelope.identity_name)
        elif scope is None:
            self._census.forget(tenant=tenant)
        elif erased:  # how much of the tenant's that was is not known
            self._runner.count_anew()
        question.answer(erased)
