"""A vLLM's events are followed over real sockets through gaps, restarts and garbage."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from cache.block_events import BlockEvents
from cache.directory import Directory
from cache.prompt_links import prompt_links, token_bytes_of
from cache.vllm_events import Untracked
from gateway.kv_events.replay import ReplayTimes
from gateway.kv_events.vllm_zmq import VllmFollower
from tests.cache.fake_vllm import FakeVllm, message
from tests.gateway.kv_events.fake_publisher import FakePublisher

ROOTS = {"salt": b"r" * 16}
TOKENS = list(range(1000, 1160))
QUICK = ReplayTimes(silence_s=0.2, all_s=2.0)


class Heard:
    """A directory that is told, and what was told."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.block_tokens = 16
        self.directory.join("remote", block_tokens=16)
        self.batches: list[BlockEvents] = []
        self._news = asyncio.Event()

    def take(self, events: BlockEvents, block_tokens: int) -> bool:
        if block_tokens != self.block_tokens:
            self.directory.leave("remote")
            self.directory.join("remote", block_tokens=block_tokens)
            self.block_tokens = block_tokens
        self.batches.append(events)
        self._news.set()
        return self.directory.apply("remote", events)

    @property
    def tokens(self) -> int:
        """How many of the prompt's tokens are believed to be there."""
        size = self.block_tokens
        links = prompt_links(ROOTS["salt"], token_bytes_of(TOKENS), block_tokens=size)
        found = self.directory.lookup({size: links}, 0.0)
        return found["remote"].device if found else 0

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as context:
        yield context


def follower(
    heard: Heard, publisher: FakePublisher, context: zmq.asyncio.Context, *, replay: bool = True
) -> VllmFollower:
    return VllmFollower(
        "remote",
        context,
        publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint if replay else None,
        root_of_salt=ROOTS.get,
        deliver=heard.take,
        times=QUICK,
    )


@asynccontextmanager
async def followed(
    context: zmq.asyncio.Context, folder: Path, *, replay: bool = True, **options: Any
) -> AsyncIterator[tuple[FakePublisher, Heard, VllmFollower]]:
    heard = Heard()
    async with (
        FakePublisher(context, folder, **options) as publisher,
        follower(heard, publisher, context, replay=replay) as following,
    ):
        await publisher.subscribed()
        yield publisher, heard, following


async def serve(publisher: FakePublisher, vllm: FakeVllm, tokens: int, **options: bool) -> None:
    vllm.serve("salt", TOKENS[:tokens])
    await publisher.publish(vllm.take(), **options)


@pytest.mark.parametrize("replay", [True, False])
async def test_what_is_published_is_found(
    context: zmq.asyncio.Context, tmp_path: Path, replay: bool
) -> None:
    async with followed(context, tmp_path, replay=replay) as (publisher, heard, following):
        vllm = FakeVllm()
        await serve(publisher, vllm, 48)
        await heard.until(lambda: heard.tokens == 48)
        vllm.evict(vllm.names("salt", TOKENS[:48])[-1])
        await publisher.publish(vllm.take())
        await heard.until(lambda: heard.tokens == 32)
        vllm.serve("another's", TOKENS)
        await serve(publisher, vllm, 160)
        await heard.until(lambda: heard.tokens == 160)
        stats = following.stats()
        assert stats.connected
        assert (stats.lives, stats.messages, stats.gaps, stats.unreadable) == (1, 3, 0, 0)
        assert stats.tracked_blocks == 11
        assert stats.untracked_blocks == {Untracked.SALT: 1, Untracked.PARENT: 9}


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="the machine has no ::1")
async def test_an_address_of_ipv6_is_followed(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    heard = Heard()
    async with FakePublisher(context, tmp_path, ipv6=True) as publisher:
        vllm = FakeVllm()
        await serve(publisher, vllm, 48, lost=True)
        async with follower(heard, publisher, context):
            await heard.until(lambda: heard.tokens == 48)  # asked for
            await publisher.subscribed()
            await serve(publisher, vllm, 160)
            await heard.until(lambda: heard.tokens == 160)


@pytest.mark.parametrize("topic", [True, False])
async def test_what_was_published_before_is_asked_for(
    context: zmq.asyncio.Context, tmp_path: Path, topic: bool
) -> None:
    heard = Heard()
    async with FakePublisher(context, tmp_path, topic=topic) as publisher:
        vllm = FakeVllm()
        for tokens in (16, 48, 160):
            await serve(publisher, vllm, tokens, lost=True)
        async with follower(heard, publisher, context) as following:
            await heard.until(lambda: heard.tokens == 160)
            assert publisher.requests == [0]
            await publisher.subscribed()
            vllm.evict(vllm.names("salt", TOKENS)[-1])
            await publisher.publish(vllm.take())
            await heard.until(lambda: heard.tokens == 144)
            stats = following.stats()
            assert (stats.messages, stats.replayed, stats.gaps) == (4, 3, 0)


async def test_a_gap_is_filled(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    async with followed(context, tmp_path) as (publisher, heard, following):
        vllm = FakeVllm()
        await serve(publisher, vllm, 32)
        await heard.until(lambda: heard.tokens == 32)
        for tokens in (64, 80, 96, 112):
            await serve(publisher, vllm, tokens, lost=True)
        publisher.lost_answers = {3}  # on the way back too
        await serve(publisher, vllm, 160)
        await heard.until(lambda: heard.tokens == 160)
        assert publisher.requests[1:] == [1, 3]
        assert following.stats().gaps == 0
        assert not any(told.snapshot for told in heard.batches[1:])


async def test_a_gap_that_cannot_be_filled_takes_back_what_was_told(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    async with followed(context, tmp_path, replay=False) as (publisher, heard, following):
        vllm = FakeVllm()
        await serve(publisher, vllm, 64)
        await heard.until(lambda: heard.tokens == 64)
        vllm.evict(vllm.names("salt", TOKENS[:64])[-1])
        await publisher.publish(vllm.take(), lost=True)
        await publisher.publish([])
        await heard.until(lambda: heard.tokens == 0)
        assert following.stats().gaps == 1
        await serve(publisher, vllm, 80)  # extends what is there yet
        await heard.until(lambda: heard.tokens == 80)
        assert {told.epoch for told in heard.batches} == {heard.batches[0].epoch}


async def test_a_publisher_that_does_not_keep_enough(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    async with followed(context, tmp_path, kept=2) as (publisher, heard, following):
        vllm = FakeVllm()
        await serve(publisher, vllm, 32)
        await heard.until(lambda: heard.tokens == 32)
        vllm.evict(vllm.names("salt", TOKENS[:32])[-1])
        await publisher.publish(vllm.take(), lost=True)
        await publisher.publish([], lost=True)
        await publisher.publish([])
        await heard.until(lambda: heard.tokens == 0)
        assert publisher.requests[1:] == [1]
        assert following.stats().gaps == 1


@pytest.mark.parametrize("replay", [True, False])
async def test_a_restarted_server_holds_nothing_at_once(
    context: zmq.asyncio.Context, tmp_path: Path, replay: bool
) -> None:
    heard = Heard()
    first = FakePublisher(context, tmp_path)
    async with follower(heard, first, context, replay=replay) as following:
        async with first:  # it comes up after its follower
            await first.subscribed()
            await serve(first, FakeVllm(), 160)
            await heard.until(lambda: heard.tokens == 160)
        await heard.until(lambda: heard.tokens == 0)
        assert not following.stats().connected
        async with FakePublisher(context, tmp_path) as second:
            await second.subscribed()
            vllm = FakeVllm(life=1, block_size=32)
            await serve(second, vllm, 64)
            await serve(second, vllm, 128)
            await heard.until(lambda: heard.tokens == 128)
            assert heard.block_tokens == 32
            stats = following.stats()
            assert (stats.connected, stats.gaps) == (True, 0)
    epochs = [told.epoch for told in heard.batches]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) > 1


async def test_a_restart_behind_a_connection_that_stays_shows_in_the_numbers(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    async with followed(context, tmp_path, replay=False) as (publisher, heard, following):
        await serve(publisher, FakeVllm(), 160)
        await heard.until(lambda: heard.tokens == 160)
        publisher.begin_again()
        await serve(publisher, FakeVllm(life=1), 32)
        await heard.until(lambda: heard.tokens == 32)
        assert (following.stats().lives, following.stats().gaps) == (2, 0)


async def test_garbage_is_counted_and_following_goes_on(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    async with followed(context, tmp_path) as (publisher, heard, following):
        vllm = FakeVllm()
        await serve(publisher, vllm, 32)
        await heard.until(lambda: heard.tokens == 32)
        for frames in ([b""], [b"", b"1", b""], [b"", b"\xff" * 8, b""], [b"", bytes(8), b"", b""]):
            await publisher.socket.send_multipart(frames)
        await serve(publisher, vllm, 48)
        await heard.until(lambda: heard.tokens == 48)
        assert (following.stats().unreadable, following.stats().gaps) == (4, 0)
        await publisher.publish_payload(b"\xc1 not msgpack")
        await heard.until(lambda: heard.tokens == 0)
        await serve(publisher, vllm, 64)
        await heard.until(lambda: heard.tokens == 64)
        vllm.serve("salt", TOKENS[:80])
        broken = {"type": "BlockRemoved", "block_hashes": 1}
        await publisher.publish([{"type": "A new kind"}, *vllm.take(), broken])
        await heard.until(lambda: heard.tokens == 0)
        stats = following.stats()
        assert (stats.unreadable, stats.unknown, stats.gaps, stats.lives) == (6, 1, 2, 1)


async def test_a_replay_that_never_ends_is_given_up(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    async with followed(context, tmp_path) as (publisher, heard, _):
        publisher.answers_end = False
        vllm = FakeVllm()
        await serve(publisher, vllm, 16)
        await serve(publisher, vllm, 32, lost=True)
        await serve(publisher, vllm, 48)
        await heard.until(lambda: heard.tokens == 48)


async def test_a_replay_endpoint_where_nobody_answers_does_not_hold_up_the_rest(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    heard = Heard()
    async with FakePublisher(context, tmp_path) as publisher:
        publisher.replay_endpoint = f"ipc://{tmp_path}/nobody"
        async with follower(heard, publisher, context):
            await publisher.subscribed()
            await serve(publisher, FakeVllm(), 32)
            await heard.until(lambda: heard.tokens == 32)


async def test_it_can_be_left_in_the_middle_of_a_replay(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    before = asyncio.all_tasks()
    async with FakePublisher(context, tmp_path) as publisher:
        publisher.answers_end = False
        heard, vllm = Heard(), FakeVllm()
        await serve(publisher, vllm, 32, lost=True)
        async with follower(heard, publisher, context):
            await heard.until(lambda: heard.tokens == 32)
        told = len(heard.batches)
        await publisher.subscribed()
        await serve(publisher, vllm, 64)
    assert len(heard.batches) == told
    assert asyncio.all_tasks() == before


async def test_a_listener_that_missed_something_is_told_from_the_beginning(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    async with followed(context, tmp_path) as (publisher, heard, following):
        vllm = FakeVllm()
        await serve(publisher, vllm, 32)
        await heard.until(lambda: heard.tokens == 32)
        heard.directory.leave("remote")
        heard.directory.join("remote", block_tokens=16)
        await serve(publisher, vllm, 48)
        await serve(publisher, vllm, 64)
        await heard.until(lambda: heard.tokens == 64)
        assert not heard.directory.needs_snapshot("remote")
        assert following.stats().gaps == 0


@pytest.mark.parametrize(
    ("endpoint", "replay_endpoint"),
    [("tcp://127.0.0.1", None), ("nothing://x", None), ("tcp://127.0.0.1:1", "tcp://127.0.0.1")],
)
async def test_an_endpoint_that_is_none_is_refused(
    context: zmq.asyncio.Context, endpoint: str, replay_endpoint: str | None
) -> None:
    refused = VllmFollower(
        "remote",
        context,
        endpoint,
        replay_endpoint=replay_endpoint,
        root_of_salt=ROOTS.get,
        deliver=Heard().take,
    )
    with pytest.raises(ValueError, match=replay_endpoint or endpoint):
        async with refused:
            pass


def test_it_runs_on_the_loop_that_serves(tmp_path: Path) -> None:
    async def follow() -> None:
        with zmq.asyncio.Context() as context:
            async with followed(context, tmp_path) as (publisher, heard, _):
                await serve(publisher, FakeVllm(), 160)
                await heard.until(lambda: heard.tokens == 160)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(follow())


async def test_a_long_backlog_leaves_room_for_others(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    heard = Heard()
    async with FakePublisher(context, tmp_path, kept=400) as publisher:
        vllm = FakeVllm()
        for salt in range(400):
            vllm.serve("salt", [salt, *range(159)])
            await publisher.publish_payload(message(vllm.take()), lost=True)
        async with follower(heard, publisher, context):
            turns = 0
            while sum(len(told.changes) for told in heard.batches) < 400:
                await asyncio.sleep(0)
                turns += 1
            assert turns > 400
