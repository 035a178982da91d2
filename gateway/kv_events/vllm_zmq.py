"""Follows what one vLLM publishes of its cache, over ZeroMQ.

Nothing that comes over the wire raises: what cannot be read is counted, what was missed is asked
for or, where that is not possible, all that was told before is taken back. A connection that was
lost may have been lost because the vLLM was started again, so that each one begins another epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import structlog
import zmq
import zmq.asyncio

from cache.block_events import BlockEvents
from cache.vllm_events import RootOfSalt, Untracked, VllmRehasher
from cache.vllm_messages import NotABatch, decode_batch
from gateway.ended_tasks import end_task
from gateway.kv_events.arrivals import Arrival, Arrivals
from gateway.kv_events.frames import Numbered, published
from gateway.kv_events.replay import USUAL_TIMES, ReplayTimes, replay
from gateway.kv_events.sockets import (
    check_endpoint,
    connect,
    is_made,
    open_socket,
    watch_connection,
)

_log = structlog.get_logger("forebay.kv_events")

_MOST_ROUNDS = 8

Deliver: TypeAlias = Callable[[BlockEvents, int], bool]
"""Called on the event loop with what has changed, and how many tokens the vLLM's blocks have; when
that number changes, what was told before is void, and the next batch a snapshot. Returns whether
that could be applied; if not, because something was missed, an empty snapshot follows."""


@dataclass(frozen=True, slots=True)
class FollowerStats:
    """`connected` now; counted since the start: `lives` that the publisher has begun, or may have,
    `messages` that were taken in, of them those that had to be asked for (`replayed`); `gaps` that
    could not be filled; `unreadable` messages or events, events of an `unknown` kind; blocks, as
    often as they were stored, that are followed or why not."""

    connected: bool
    lives: int
    messages: int
    replayed: int
    gaps: int
    unreadable: int
    unknown: int
    tracked_blocks: int
    untracked_blocks: Mapping[Untracked, int]


class VllmFollower:
    """An async scope: one publisher is followed inside it. Belongs to the event loop."""

    def __init__(
        self,
        replica: str,
        context: zmq.asyncio.Context,
        endpoint: str,
        *,
        replay_endpoint: str | None,
        root_of_salt: RootOfSalt,
        deliver: Deliver,
        times: ReplayTimes = USUAL_TIMES,
    ) -> None:
        """`replica` is its name in the log. `context` outlives the scope, and may be shared."""
        self._replica = replica
        self._context = context
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._rehasher = VllmRehasher(root_of_salt)
        self._deliver = deliver
        self._times = times
        self._arrivals = Arrivals()
        self._connected = False
        self._lives = self._messages = self._replayed = 0
        self._gaps = self._unreadable = self._unknown = 0
        self._explained: set[Untracked] = set()
        self._scope = AsyncExitStack()

    async def __aenter__(self) -> VllmFollower:
        """Raises ValueError for an endpoint that is none."""
        check_endpoint(self._context, self._endpoint)
        if self._replay_endpoint is not None:
            check_endpoint(self._context, self._replay_endpoint)
        async with AsyncExitStack() as scope:
            socket = scope.enter_context(open_socket(self._context, zmq.SUB))
            monitor = scope.enter_context(watch_connection(socket))
            socket.subscribe(b"")
            connect(socket, self._endpoint)
            following = asyncio.create_task(self._follow(socket, monitor))
            scope.push_async_callback(end_task, following)
            following.add_done_callback(self._ended)
            self._scope = scope.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._scope.aclose()

    def stats(self) -> FollowerStats:
        """What came of it so far; cheap."""
        return FollowerStats(
            connected=self._connected,
            lives=self._lives,
            messages=self._messages,
            replayed=self._replayed,
            gaps=self._gaps,
            unreadable=self._unreadable,
            unknown=self._unknown,
            tracked_blocks=self._rehasher.tracked,
            untracked_blocks=dict(self._rehasher.untracked),
        )

    async def _follow(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            if monitor in ready:
                await self._note_connection(await monitor.recv_multipart())
                continue
            frames = await socket.recv_multipart()
            # a connection is told of before what comes through it
            while await monitor.poll(0):
                await self._note_connection(await monitor.recv_multipart())
            message = published(frames)
            if message is None or message.ends_replay:
                self._unreadable += 1
            else:
                await self._take_published(message)
            await asyncio.sleep(0)  # a backlog must not keep the loop from others

    async def _note_connection(self, news: list[bytes]) -> None:
        self._connected = is_made(news)
        self._begin_life()
        if self._connected:
            _log.info("following KV events", replica=self._replica, endpoint=self._endpoint)
            await self._catch_up()
        else:
            _log.warning("KV events are lost", replica=self._replica, endpoint=self._endpoint)

    async def _take_published(self, message: Numbered) -> None:
        arrival = self._arrivals.published(message.number)
        if arrival is Arrival.RESTARTED:
            _log.info("KV events begin again", replica=self._replica)
            self._begin_life()
            await self._catch_up()
            arrival = self._arrivals.published(message.number)
        elif arrival is Arrival.LATER:
            await self._catch_up()
            arrival = self._arrivals.of(message.number)
        if arrival is not Arrival.KNOWN:
            await self._take(message)

    async def _catch_up(self) -> None:
        """Ask for what comes after the last message, or for all that is kept."""
        if self._replay_endpoint is None:
            return
        for _ in range(_MOST_ROUNDS):
            if await self._replay_until_hole(self._replay_endpoint):
                return

    async def _replay_until_hole(self, endpoint: str) -> bool:
        """Whether all came that is kept. If not, some answers were lost on the way."""
        taken = self._arrivals.taken
        answers = replay(self._context, endpoint, 0 if taken is None else taken + 1, self._times)
        begun = False
        async with aclosing(answers):
            async for message in answers:
                arrival = self._arrivals.of(message.number)
                if arrival is Arrival.KNOWN:
                    continue
                if arrival is Arrival.LATER and begun:
                    return False
                begun = True
                self._replayed += 1
                await self._take(message)
        return True

    async def _take(self, message: Numbered) -> None:
        if self._arrivals.of(message.number) is Arrival.LATER:
            self._miss("messages are missing")
        self._arrivals.take(message.number)
        self._messages += 1
        try:
            batch = decode_batch(message.payload)
        except NotABatch:
            self._unreadable += 1
            self._miss("a message cannot be read")
            return
        self._unknown += batch.unknown
        for events in self._rehasher.follow(batch.events):
            self._tell(events)
            await asyncio.sleep(0)
        self._explain()
        if batch.malformed:
            self._unreadable += batch.malformed
            self._miss("an event cannot be read")

    def _explain(self) -> None:
        """Say once of each reason that some blocks are not followed for it."""
        for reason in self._rehasher.untracked.keys() - self._explained:
            self._explained.add(reason)
            _log.info("some KV blocks are not followed", replica=self._replica, reason=reason.value)

    def _miss(self, why: str) -> None:
        """What is lost may have been about any block."""
        self._gaps += 1
        _log.warning("KV events were missed", replica=self._replica, reason=why)
        self._tell(self._rehasher.forget_told())

    def _begin_life(self) -> None:
        self._lives += 1
        self._arrivals = Arrivals()
        block_tokens = self._rehasher.block_tokens
        events = self._rehasher.begin_life()
        if block_tokens is not None:
            self._deliver(events, block_tokens)

    def _tell(self, events: BlockEvents) -> None:
        block_tokens = self._rehasher.block_tokens
        if block_tokens is None:
            return  # no block has been told of yet
        if not self._deliver(events, block_tokens):
            self._deliver(self._rehasher.forget_told(), block_tokens)

    def _ended(self, following: asyncio.Task[None]) -> None:
        if not following.cancelled() and (error := following.exception()) is not None:
            self._connected = False
            _log.error("KV events are not followed any more", replica=self._replica, exc_info=error)
            self._begin_life()
