"""A model's servers elsewhere: used, added, replaced and left as the configuration says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from time import monotonic

import structlog
import zmq.asyncio

from cache.block_events import BlockEvents
from cache.directory import Directory
from cache.vllm_events import RootOfSalt
from gateway.credentials import remote_key
from gateway.dispatch.member import Member
from gateway.dispatch.router import Router
from gateway.kv_events.vllm_zmq import VllmFollower
from gateway.news.fleet_news import FleetNews
from gateway.remote.replica import RemoteReplica, open_remote_replica
from gateway.replica_group import ReplicaGroup
from gateway.settings_fleet import CACHE_CAN_BE_OFF, RemoteSettings
from policies.routing import Standing

_log = structlog.get_logger("forebay.fleet")

_BLOCK_TOKENS = 16
_BLOCKS_FOLLOWED = 65_536
"""Of a server that tells nothing: a million tokens, as a GPU holds of a middling model. Fewer that
are really there show in what it says was cached, and the entries shrink."""
_UNTIL_TOLD_S = 60.0
"""How long what was sent to a server counts as there that also tells what it holds."""
_FIRST_PROBE_S = 3.0


class RemoteReplicas:
    """Opens and closes the replicas of one remote model. Belongs to the event loop."""

    def __init__(
        self,
        model: str,
        router: Router[RemoteReplica],
        directory: Directory,
        environ: Mapping[str, str],
        root_of_salt: RootOfSalt,
    ) -> None:
        """`root_of_salt` says which prefix chain is kept under a salt that this gateway gave."""
        self._root_of_salt = root_of_salt
        self.group: ReplicaGroup[RemoteReplica] = ReplicaGroup(router)
        self.followers: dict[str, VllmFollower] = {}
        """Of those that tell what they hold, by their replicas' names."""
        self._model = model
        self._directory = directory
        self._environ = environ
        self._wanted: Sequence[RemoteSettings] = ()
        self._settings: dict[str, RemoteSettings] = {}
        self._reported: dict[str, Standing] = {}

    async def open(self, remotes: Sequence[RemoteSettings]) -> None:
        """Use these servers. One that does not answer is used once it does. Raises ConfigError
        where a server's key is not set."""
        self._wanted = remotes
        for remote in remotes:
            await self.add(remote)

    async def probed(self) -> None:
        """Wait until it is known how each server is, 3 seconds at most, so that the first request
        does not find all of them unprobed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_PROBE_S):
                for member in self.group.router.members:
                    await member.replica.probed()

    async def add(self, remote: RemoteSettings) -> str:
        """One more server; returns its replica's name. Raises as `open`, and ValueError for one
        that is used already."""
        remote_key(remote, self._environ)
        async with AsyncExitStack() as held:
            name: list[str] = []
            replica = await open_remote_replica(
                self._model,
                remote,
                self._environ,
                on_change=self.group.router.changed,
                on_load=lambda load: self._reported.__setitem__(name[0], load),
                on_restart=lambda: self._forget(name[0], remote),
            )
            held.push_async_callback(replica.close)
            name.append(replica.name)
            if self.group.router.find(replica.name) is not None:
                raise ValueError("this server is used already")
            self._join(replica.name, remote, _BLOCK_TOKENS)
            held.callback(self._directory.leave, replica.name)
            held.callback(self._settings.pop, replica.name, None)
            held.callback(self._reported.pop, replica.name, None)
            self._settings[replica.name] = remote
            member = Member(
                replica,
                "remote",
                max_running=remote.max_running,
                capacity=None,
                block_tokens=_BLOCK_TOKENS,
                clock=monotonic,
            )
            if remote.kv_events is not None:
                context = held.enter_context(zmq.asyncio.Context())
                follower = await held.enter_async_context(
                    VllmFollower(
                        replica.name,
                        context,
                        remote.kv_events,
                        replay_endpoint=remote.kv_replay,
                        root_of_salt=self._root_of_salt,
                        deliver=partial(self._take_in, member, remote),
                    )
                )
                self.followers[replica.name] = follower
                held.callback(self.followers.pop, replica.name)
            self.group.hold(member, held, tells_events=False)
        _log.info("remote replica", replica=replica.name, model=self._model, engine=remote.engine)
        return replica.name

    async def become(self, remotes: Sequence[RemoteSettings], drain_s: float) -> None:
        """Use exactly these servers: new ones are added before old ones are drained, unless they
        take their names. Without effect if they are what was wanted before: the operator may have
        changed the fleet since."""
        if remotes == self._wanted:
            return
        wanted = list(remotes)
        left = [name for name, settings in self._settings.items() if settings not in wanted]
        new = [remote for remote in wanted if remote not in self._settings.values()]
        names = {f"{self._model}/{remote.host}" for remote in new}
        await self._retire([name for name in left if name in names], drain_s)
        for remote in new:
            await self.add(remote)
        await self._retire([name for name in left if name not in names], drain_s)
        self._wanted = remotes

    async def _retire(self, names: Sequence[str], drain_s: float) -> None:
        """All at once: what is cut off at one must not move to another that is to go as well."""
        await asyncio.gather(*(self.group.retire(name, drain_s) for name in names))

    def note_foreign(self, news: FleetNews) -> None:
        """Take in what others have put on the servers: as the other gateways say, or as the servers
        say themselves, whichever is more."""
        now_s = monotonic()
        for member in self.group.router.members:
            said = news.foreign(member.name, now_s)
            seen = self._reported.get(member.name, Standing())
            member.load.set_foreign(
                Standing(
                    pending_tokens=max(said.pending_tokens, seen.pending_tokens),
                    waiting=max(said.waiting, seen.waiting),
                    running=max(said.running, seen.running),
                    context_tokens=max(said.context_tokens, seen.context_tokens),
                )
            )

    async def close(self) -> None:
        """Leave all of them."""
        await self.group.close()

    def _join(self, name: str, remote: RemoteSettings, block_tokens: int) -> None:
        """Whatever it tells, it is also followed by what is sent to it: a vLLM's events need not
        say enough. Not one that is asked to keep nothing: there is nothing to be found there."""
        if remote.engine in CACHE_CAN_BE_OFF and remote.shared_cache == "refuse":
            return
        self._directory.join(
            name,
            block_tokens=block_tokens,
            approximate_blocks=_BLOCKS_FOLLOWED,
            ttl_s=None if remote.kv_events is None else _UNTIL_TOLD_S,
        )

    def _forget(self, name: str, remote: RemoteSettings) -> None:
        """The server has been restarted: what it had cached is gone."""
        member = self.group.router.find(name)
        self._directory.leave(name)
        self._join(name, remote, _BLOCK_TOKENS if member is None else member.block_tokens)

    def _take_in(
        self,
        member: Member[RemoteReplica],
        remote: RemoteSettings,
        events: BlockEvents,
        block_tokens: int,
    ) -> bool:
        """What a vLLM tells of its cache, in blocks of its own size."""
        if member.block_tokens != block_tokens:
            member.block_tokens = block_tokens
            self._directory.leave(member.name)
            self._join(member.name, remote, block_tokens)
        return self._directory.apply(member.name, events)
