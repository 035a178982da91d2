"""One sequence's way through the replicas: a lost one's part is carried on by another.

Tokens are all that has to travel: draws and penalties are functions of seed, position and the
tokens so far (`EngineRequest.generated_token_ids`), so that the text goes on as if nothing had
happened, and whoever reads the outputs does not notice.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from time import monotonic
from types import TracebackType

from engine.request import EngineOutput, EngineRequest
from gateway.dispatch.member import Condition
from gateway.dispatch.placement import Placement
from gateway.dispatch.prefix import Prefix
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import NoReplica, Router
from gateway.replica import Replica, ReplicaUnavailable, TokenStream
from policies.routing import RouteRequest

_MOST_FRUITLESS = 2
"""Replicas that one request may break down without a token of its own: it may be the request that
breaks them, and the next would only be one more."""


@dataclass(frozen=True, slots=True)
class MoveTerms:
    """A sequence moves at most `moves` times, and waits at most `recovery_s` in all for a replica
    that is coming back."""

    moves: int = 3
    recovery_s: float = 20.0


def route_request(request: EngineRequest, generated: int = 0) -> RouteRequest:
    """What routing knows of it, when so many tokens have been generated already."""
    return RouteRequest(
        prompt_tokens=len(request.prompt_token_ids) + generated,
        max_tokens=max(1, request.params.max_tokens - generated),
        priority=request.priority,
        flow=request.flow,
        weight=request.weight,
        due_s=None if request.deadline_s is None else request.deadline_s - monotonic(),
    )


class Run:
    """Entering its scope places and submits the request; leaving it ends it wherever it is.

    Iterate over it once, for the outputs. A request that no replica takes, or that was lost more
    often than `terms` allow, raises ReplicaUnavailable. `receipts` has one entry for every time
    that it was sent somewhere.
    """

    def __init__(
        self,
        router: Router[Replica],
        request: EngineRequest,
        prefix: Prefix,
        terms: MoveTerms,
    ) -> None:
        self.receipts: list[Receipt] = []
        self._router = router
        self._request = request
        self._prefix = prefix
        self._terms = terms
        self._generated: list[int] = list(request.generated_token_ids)
        self._moves = 0
        self._lost_by: set[str] = set()
        self._fruitless = 0
        self._left = False
        self._stay = AsyncExitStack()
        self._placement: Placement[Replica]
        self._stream: TokenStream

    @property
    def replica(self) -> str:
        """Where it runs, or ran last."""
        return self._placement.member.name

    async def __aenter__(self) -> Run:
        try:
            await self._begin()
        except ReplicaUnavailable as lost:
            await self._move(lost)
        except NoReplica as nowhere:
            raise ReplicaUnavailable(str(nowhere), full=nowhere.full) from nowhere
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # it may be on its way to another replica just now, in a task that reads the outputs
        self._left = True
        await self._stay.aclose()

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> EngineOutput:
        while True:
            try:
                output = await anext(self._stream)
            except ReplicaUnavailable as lost:
                await self._move(lost)
                if self._left:
                    raise StopAsyncIteration from None
                continue
            if output.token_ids:
                self._generated += output.token_ids
                self._placement.began(output.cached_tokens)
            return output

    async def _begin(self) -> None:
        """Where others' requests are just finding out whether a replica is well again, that is
        waited for: most likely it is. Raises NoReplica, or ReplicaUnavailable as `_submit`."""
        deadline_s = monotonic() + self._terms.recovery_s
        while True:
            try:
                await self._submit(moved_from=None)
            except NoReplica as nowhere:
                if nowhere.full or not self._one_is_being_tried:
                    raise
                if not await self._router.wait_until_serving(deadline_s - monotonic()):
                    raise
            else:
                return

    @property
    def _one_is_being_tried(self) -> bool:
        """A replica says that it serves, and nothing but its breaker keeps requests away."""
        return any(
            member.health().condition is Condition.SERVING for member in self._router.members
        )

    async def _submit(self, moved_from: str | None) -> None:
        """Place it and hand it over; what was acquired is given back if the replica refuses, and
        if nobody wants it any more."""
        request, ask = self._request, route_request(self._request, len(self._generated))
        if self._generated:
            request = replace(request, generated_token_ids=tuple(self._generated))
        if self._moves:
            request = replace(request, request_id=f"{request.request_id}~{self._moves}")
        async with AsyncExitStack() as stay:
            placement = stay.enter_context(
                self._router.place(
                    ask,
                    self._prefix,
                    exclude=self._lost_by,
                    moved_from=moved_from,
                    had_begun=bool(self._generated),
                )
            )
            self._placement = placement
            self.receipts.append(placement.receipt)
            before = len(self._generated)
            stay.callback(lambda: placement.answered(len(self._generated) - before))
            self._stream = await stay.enter_async_context(placement.replica.submit(request))
            if self._left:
                return
            if (warmer := self._router.warmer) is not None:
                warmer.sent(request, self._prefix, placement.receipt)
            self._stay = stay.pop_all()

    async def _move(self, lost: ReplicaUnavailable) -> None:
        """Carry on elsewhere. Raises what was lost where that is not to be had."""
        deadline_s = monotonic() + self._terms.recovery_s
        while True:
            # closed first: a probe that ends with nothing said of the replica tells nothing, and
            # the next one may follow
            await self._stay.aclose()
            self._note_loss(lost)
            spent = self._moves >= self._terms.moves or self._fruitless >= _MOST_FRUITLESS
            if lost.full or spent:
                raise lost
            self._moves += 1
            try:
                found = await self._find_place(deadline_s)
            except ReplicaUnavailable as again:
                lost = again
                continue
            if not found:
                raise lost
            return

    async def _find_place(self, deadline_s: float) -> bool:
        """False if no replica is to be had until then. Raises ReplicaUnavailable where one was and
        has lost it already."""
        moved_from = self._placement.member.name
        while not self._left:
            try:
                await self._submit(moved_from)
            except NoReplica as nowhere:
                rest_s = deadline_s - monotonic()
                if nowhere.full or not await self._router.wait_until_serving(rest_s):
                    return False
                # the last resort is one that lost it before: back again, or never gone
                self._lost_by.clear()
            else:
                return True
        return True

    def _note_loss(self, lost: ReplicaUnavailable) -> None:
        placement = self._placement
        self._lost_by.add(placement.member.name)
        if lost.blames_replica:
            placement.lost(str(lost))
            self._fruitless += not self._generated
        else:
            placement.receipt.lost = str(lost)
