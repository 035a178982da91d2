"""A remote model's servers, as reloads change them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest

from cache.directory import Directory
from gateway.dispatch.router import Router
from gateway.metrics import Metrics
from gateway.remote.group import RemoteReplicas
from gateway.remote.replica import RemoteReplica
from gateway.routing_policies import load_policy
from gateway.settings_fleet import RemoteSettings
from policies.routing import NOTHING_CACHED
from tests.gateway.stage import Observer, eventually

NO_SERVER = "127.0.0.1:9"
"""Nothing listens at the discard port."""


def remote(path: str = "v1", host: str = NO_SERVER, **fields: object) -> RemoteSettings:
    return RemoteSettings.model_validate(
        {"url": f"http://{host}/{path}", "engine": "vllm", **fields}
    )


@pytest.fixture
async def remotes() -> AsyncIterator[RemoteReplicas]:
    policy = "round-robin"
    router: Router[RemoteReplica] = Router(
        "m",
        Directory(),
        load_policy(policy),
        policy,
        Random(0),
        Observer(Metrics(["m"], [], b"secret")),
    )
    group = RemoteReplicas("m", router, router.directory, {}, {}.get)
    yield group
    await group.close()


def used(remotes: RemoteReplicas) -> dict[str, int]:
    return {m.name: m.load.max_running for m in remotes.group.router.members}


async def test_a_server_whose_settings_change_is_used_with_the_new_ones(
    remotes: RemoteReplicas,
) -> None:
    other = "127.0.0.1:19"
    await remotes.become([remote(max_running=4), remote(host=other)], 1)
    await remotes.become([remote(max_running=8), remote(host=other)], 1)
    assert used(remotes) == {f"m/{NO_SERVER}": 8, f"m/{other}": 64}
    await remotes.become([remote(host=other)], 1)
    assert used(remotes) == {f"m/{other}": 64}


async def test_servers_that_are_to_go_are_drained_all_at_once(remotes: RemoteReplicas) -> None:
    hosts = [f"127.0.0.1:{port}" for port in (9, 19, 29)]
    await remotes.become([remote(host=host) for host in hosts], 1)
    members = remotes.group.router.members
    with members[0].load.share(1, 1), members[1].load.share(1, 1):
        leaving = asyncio.create_task(remotes.become([remote(host=hosts[2])], 5))
        await eventually(lambda: members[0].draining and members[1].draining)
    await asyncio.wait_for(leaving, 2)
    assert list(used(remotes)) == [f"m/{hosts[2]}"]


async def test_a_server_that_is_used_already_is_refused(remotes: RemoteReplicas) -> None:
    await remotes.add(remote())
    with pytest.raises(ValueError, match="used already"):
        await remotes.add(remote("v2"))
    assert len(used(remotes)) == 1


@pytest.mark.parametrize(("shared_cache", "expected"), [("refuse", 0), ("accept", 32)])
async def test_nothing_is_expected_where_nothing_is_kept(
    remotes: RemoteReplicas, shared_cache: str, expected: int
) -> None:
    name = await remotes.add(remote(engine="llama.cpp", shared_cache=shared_cache))
    directory, links = remotes.group.router.directory, [b"a" * 16, b"b" * 16]
    directory.note_routed(name, links, 0.0)
    assert directory.lookup({16: links}, 0.0).get(name, NOTHING_CACHED).tokens == expected
