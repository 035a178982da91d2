"""What a remote vLLM tells draws prompts to it, in blocks of its own size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import zmq.asyncio

from cache.directory import Directory
from cache.prompt_links import prompt_links, token_bytes_of
from gateway.dispatch.prefix import Prefix
from gateway.dispatch.router import Router
from gateway.remote.group import RemoteReplicas
from gateway.remote.replica import RemoteReplica
from gateway.settings_fleet import RemoteSettings
from policies.routing import NOTHING_CACHED
from policies.routing_ttft import PredictedTtft
from tests.cache.fake_vllm import FakeVllm
from tests.gateway.kv_events.fake_publisher import FakePublisher
from tests.gateway.remote.remote_stage import NobodyWatches
from tests.gateway.stage import eventually

ROOT = b"r" * 16
TOKENS = list(range(1000, 1160))
NOBODY = "127.0.0.1:9"
PREFIX = Prefix(lambda size: prompt_links(ROOT, token_bytes_of(TOKENS), block_tokens=size))


@asynccontextmanager
async def a_vllm(publisher: FakePublisher) -> AsyncIterator[RemoteReplicas]:
    """Its API is not there; what its cache holds is told nevertheless."""
    router: Router[RemoteReplica] = Router(
        "m", Directory(), PredictedTtft(), "predicted-ttft", Random(), NobodyWatches()
    )
    remotes = RemoteReplicas("m", router, router.directory, {}, {"salt": ROOT}.get)
    settings = RemoteSettings(
        url=f"http://{NOBODY}/v1",
        engine="vllm",
        kv_events=publisher.endpoint,
        kv_replay=publisher.replay_endpoint,
    )
    await remotes.add(settings)
    try:
        await publisher.subscribed()
        yield remotes
    finally:
        await remotes.close()


def held(remotes: RemoteReplicas) -> int:
    router = remotes.group.router
    sizes = {member.block_tokens for member in router.members}
    found = router.directory.lookup(PREFIX.by_size(sizes), 0.0)
    return found.get(f"m/{NOBODY}", NOTHING_CACHED).device


async def test_it_is_known_what_a_vllm_holds(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    with zmq.asyncio.Context() as context:
        async with FakePublisher(context, tmp_path) as publisher, a_vllm(publisher) as remotes:
            vllm = FakeVllm(block_size=32)
            vllm.serve("salt", TOKENS[:70])
            await publisher.publish(vllm.take())
            await eventually(lambda: held(remotes) == 64)
            assert remotes.group.router.members[0].block_tokens == 32
            vllm.evict(vllm.names("salt", TOKENS[:70])[-1])
            vllm.serve("salt", TOKENS)
            await publisher.publish(vllm.take())
            await eventually(lambda: held(remotes) == 160)
            vllm.clear()
            await publisher.publish(vllm.take())
            await eventually(lambda: held(remotes) == 0)
    assert asyncio.all_tasks() == before


async def test_a_restarted_vllm_is_followed_in_its_new_blocks(tmp_path: Path) -> None:
    with zmq.asyncio.Context() as context:
        async with FakePublisher(context, tmp_path) as publisher, a_vllm(publisher) as remotes:
            vllm = FakeVllm()
            vllm.serve("salt", TOKENS)
            await publisher.publish(vllm.take())
            await eventually(lambda: held(remotes) == 160)
            publisher.begin_again()
            again = FakeVllm(life=1, block_size=64)
            again.serve("salt", TOKENS)
            await publisher.publish(again.take())
            await eventually(lambda: held(remotes) == 128)
            assert remotes.group.router.members[0].block_tokens == 64
