"""Loads a hot prefix onto a second replica before a queue forms at the first."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Literal

import structlog

from cache.directory import Directory
from engine.request import EngineRequest, FinishReason
from engine.sampling_params import SamplingParams
from gateway.dispatch.member import Member
from gateway.dispatch.prefix import Prefix
from gateway.dispatch.receipt import Receipt
from gateway.replica import Replica, ReplicaUnavailable
from policies.routing import Candidate
from policies.warming import HotPrefix, Warming, WarmUp, occupied_s

_log = structlog.get_logger("forebay.routing")

Outcome = Literal["loaded", "computed", "late", "failed", "cancelled"]
"""`computed`: the target had less of it than was believed, and had to compute the rest. `late`: it
was given up. `failed`: the target did not take it, or lost it. `cancelled`: the target takes no
requests any more, or all is being closed."""

WARM_UP_PRIORITY = 1_000_000
"""Behind whatever anybody waits for."""
_AT_ONCE = 4
_TIMEOUT_S = 5.0
"""Half of the time that a copy is made for (`Warming`); a load takes a small part of that."""


@dataclass(frozen=True, slots=True)
class _Errand:
    """One warm-up under way. `candidate` is its target as it was believed to be, `links` are those
    of the prefix's blocks."""

    warm_up: WarmUp
    candidate: Candidate
    member: Member[Replica]
    request: EngineRequest
    links: Sequence[bytes]
    began_s: float


class Warmer:
    """One model's, whose replicas are engines of ours. Belongs to the event loop.

    A warm-up is a request of which nobody wants the answer: it finds the prefix in the target's
    lower tiers, and leaves it in its pages. It counts in the target's load, behind everything
    else; it is no tenant's, except that the blocks stay their owner's. The prompt's tokens are kept
    for as long as it runs.
    """

    def __init__(
        self,
        model: str,
        find: Callable[[str], Member[Replica] | None],
        directory: Directory,
        warmed_up: Callable[[str, Outcome], None],
        random: Random,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`find` knows the replicas by name; `warmed_up` hears of each warm-up's end, with the
        model's name."""
        self._model = model
        self._find = find
        self._directory = directory
        self._warmed_up = warmed_up
        self._random = random
        self._clock = clock
        self._warming = Warming()
        self._under_way: dict[asyncio.Task[Outcome], _Errand] = {}
        self._closed = False

    def sent(self, request: EngineRequest, prefix: Prefix, receipt: Receipt) -> None:
        """A request was sent where its receipt says; see whether its prefix should be elsewhere
        too."""
        candidates = receipt.candidates
        if self._closed or len(candidates) < 2:
            return
        now_s = self._clock()
        warmest = max(candidates, key=_cached_tokens)
        links = self._links(prefix, warmest)
        hot = HotPrefix(links[-1], warmest.cached.tokens) if links else None
        self._warming.routed(hot, receipt.candidate.name, _work_s(receipt), now_s)
        if hot is None or len(self._under_way) >= _AT_ONCE:
            return
        warm_up = self._warming.propose(hot, candidates, now_s, self._random)
        if warm_up is None:
            return
        member = self._find(warm_up.target)
        if member is None or not (member.breaker.closed and member.takes_requests()):
            self._warming.done(warm_up)
            return
        target = next(one for one in candidates if one.name == warm_up.target)
        self._begin(_Errand(warm_up, target, member, _loading(request, hot.tokens), links, now_s))

    def targets_changed(self) -> None:
        """Give up what goes to replicas that take no requests any more: they are to get empty."""
        for task, errand in self._under_way.items():
            if not errand.member.takes_requests():
                task.cancel()

    async def close(self) -> None:
        """End what is under way, and begin nothing more. Idempotent."""
        self._closed = True
        if self._under_way:
            for task in self._under_way:
                task.cancel()
            await asyncio.wait(list(self._under_way))

    def _links(self, prefix: Prefix, warmest: Candidate) -> Sequence[bytes]:
        """Of the blocks that the warmest replica has."""
        member = self._find(warmest.name)
        if member is None or not warmest.cached.tokens:
            return ()
        size = member.block_tokens
        return prefix.of(size)[: warmest.cached.tokens // size]

    def _begin(self, errand: _Errand) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(errand))
        self._under_way[task] = errand
        task.add_done_callback(self._over)

    async def _carry_out(self, errand: _Errand) -> Outcome:
        request, member = errand.request, errand.member
        tokens = len(request.prompt_token_ids)
        prefix_tokens = errand.warm_up.prefix.tokens
        try:
            with member.load.share(max(1, tokens - prefix_tokens), tokens, request.priority):
                async with asyncio.timeout(_TIMEOUT_S):
                    served_tokens = await _run(member.replica, request)
        except TimeoutError:
            return "late"
        except ReplicaUnavailable:
            return "failed"
        if served_tokens is None:
            return "failed"
        self._directory.correct(
            member.name,
            errand.links,
            served_tokens,
            promised=errand.candidate.cached,
            decided_s=errand.began_s,
            now_s=self._clock(),
        )
        # the last token of a prompt is computed, and its block with it
        most = tokens - 1 - (tokens - 1) % member.block_tokens
        return "loaded" if served_tokens >= min(prefix_tokens, most) else "computed"

    def _over(self, task: asyncio.Task[Outcome]) -> None:
        errand = self._under_way.pop(task)
        self._warming.done(errand.warm_up)
        outcome: Outcome = "cancelled"
        if not task.cancelled():
            failure = task.exception()
            outcome = "failed" if failure is not None else task.result()
            if failure is not None:
                _log.error("prefix warm-up broke down", model=self._model, exc_info=failure)
        self._warmed_up(self._model, outcome)
        _log.info(
            "prefix warm-up",
            model=self._model,
            replica=errand.member.name,
            source=errand.warm_up.source,
            tokens=errand.warm_up.prefix.tokens,
            outcome=outcome,
            seconds=round(self._clock() - errand.began_s, 4),
        )


def _cached_tokens(candidate: Candidate) -> int:
    return sum(candidate.cached)


def _work_s(receipt: Receipt) -> float:
    """How long the request will occupy the replica that it was sent to; the answer counts once it
    is known how long answers are."""
    candidate, request = receipt.candidate, receipt.request
    uncached_tokens = max(1, request.prompt_tokens - candidate.cached.tokens)
    return occupied_s(
        candidate.cost,
        uncached_tokens,
        request.prompt_tokens - uncached_tokens,
        min(candidate.standing.answer_tokens, request.max_tokens),
    )


def _loading(request: EngineRequest, prefix_tokens: int) -> EngineRequest:
    """A request that loads the prefix of another one: one token more, if there is one, so that all
    of the prefix can come from the cache."""
    return EngineRequest(
        request_id=f"warm-up-{secrets.token_hex(8)}",
        prompt_token_ids=request.prompt_token_ids[: prefix_tokens + 1],
        params=SamplingParams(max_tokens=1, temperature=0.0),
        chain_root=request.chain_root,
        priority=WARM_UP_PRIORITY,
        owner=request.owner,
        shared=request.shared,
    )


async def _run(replica: Replica, request: EngineRequest) -> int | None:
    """How many tokens came from the cache; None if the replica gave up on it. Raises
    ReplicaUnavailable."""
    async with replica.submit(request) as outputs:
        async for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                return None
            if output.token_ids:
                return output.cached_tokens
    return None
