"""A request's way from replica to replica, until one has answered it or none is left to ask."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from time import monotonic
from types import TracebackType

from gateway.dispatch.member import Condition
from gateway.dispatch.placement import Placement
from gateway.dispatch.prefix import Prefix
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import NoReplica, Router
from gateway.dispatch.run import MoveTerms
from gateway.errors import ApiError, unavailable
from gateway.remote.failures import (
    LossKind,
    UpstreamAway,
    UpstreamFull,
    UpstreamLost,
    UpstreamMisconfigured,
)
from gateway.remote.replica import RemoteReplica
from policies.routing import RouteRequest

_RETRY_AFTER_S = 1
_SAME_AGAIN_S = 0.1
"""Before the same replica is asked again, and twice as long each time after that."""
_jitter = Random()

RemotePlacement = Placement[RemoteReplica]


@dataclass(slots=True)
class Route:
    """What routing is asked, the same each time. `foreseen` is what it said when the request was
    let in."""

    request: RouteRequest
    prefix: Prefix
    foreseen: Receipt | None = None


class Course:
    """Counts the moves and remembers who failed. One per request.

    `receipts` gets one entry for every time that the request was sent somewhere.
    """

    def __init__(
        self,
        router: Router[RemoteReplica],
        route: Route,
        terms: MoveTerms,
        receipts: list[Receipt],
        request_id: str,
    ) -> None:
        self._router = router
        self._route = route
        self._terms = terms
        self._receipts = receipts
        self._request_id = request_id
        self._tried: set[str] = set()
        self._moves = 0
        self._rounds = 0
        self._suspects: list[RemotePlacement] = []
        self._moved_from: str | None = None
        self._was_full = False
        self._deadline_s: float | None = None
        self._failure: ApiError | None = None
        self.predicted_ttft_s = 0.0
        """Of the replica that was placed last."""

    def at_a_replica(self, *, had_begun: bool) -> Visit:
        """The scope of one try, at the next replica: one that has not failed this request, else one
        that has, after a pause. Entering raises ApiError if there is none.

        It ends quietly where the request may be placed again: the replica has lost it, has no room,
        or does not know us. It raises the ApiError to give up with where it may not.
        """
        return Visit(self, had_begun)

    async def _place(self, had_begun: bool) -> RemotePlacement:
        route = self._route
        while True:
            try:
                return self._router.place(
                    route.request,
                    route.prefix,
                    exclude=self._tried,
                    moved_from=self._moved_from,
                    had_begun=had_begun,
                    foreseen=None if self._moved_from is not None else route.foreseen,
                )
            except NoReplica as none:
                await self._wait_for_another(none)

    def _went_to(self, placement: RemotePlacement) -> None:
        self._receipts.append(placement.receipt)
        self.predicted_ttft_s = placement.receipt.predicted_ttft_s

    def _noted(self, placement: RemotePlacement, error: BaseException | None) -> bool:
        """Whether what ended a try leaves the request to be placed again."""
        match error:
            case None:
                self._blame_suspects()
                return False
            case UpstreamLost(kind=LossKind.NO_FILES):
                self._unsent(placement, error)
            case UpstreamLost():
                self._lost(placement, error)
            case UpstreamFull():
                self._full(placement, error)
            case UpstreamAway():
                self._away(placement, error)
            case UpstreamMisconfigured():
                self._misconfigured(placement, error)
            case ApiError():
                placement.member.answered()  # it is well: the mistake is its client's
                return False
            case _:
                return False
        return True

    def _lost(self, placement: RemotePlacement, error: UpstreamLost) -> None:
        """The replica has lost the request, or did not take it."""
        placement.replica.lost(error, self._request_id)
        self._failure = nowhere()
        if _may_be_the_request(error) and placement.member.breaker.closed:
            placement.receipt.lost = str(error.kind)
            self._suspects.append(placement)
            if len(self._suspects) > 1:
                raise _broken_by_request()
        else:
            placement.lost(str(error.kind))
        self._move(placement)

    def _unsent(self, placement: RemotePlacement, error: UpstreamLost) -> None:
        """The replica has not been asked, by no fault of its own."""
        placement.receipt.lost = str(error.kind)
        if not placement.member.breaker.closed:
            placement.member.failed()  # it was the breaker's probe
        self._failure = nowhere()
        self._move(placement)

    def _blame_suspects(self) -> None:
        """Another answers what these could not: it was not the request."""
        for suspect in self._suspects:
            suspect.member.failed()
        self._suspects.clear()

    def _full(self, placement: RemotePlacement, error: UpstreamFull) -> None:
        """The replica has no room now: another is asked, once."""
        placement.receipt.lost = "full"
        placement.member.answered()
        self._failure = unavailable(
            "The servers of this model have no room now.",
            code="capacity_exceeded",
            retry_after_s=error.retry_after_s,
        )
        if self._was_full:
            raise self._failure
        self._was_full = True
        self._move(placement)

    def _away(self, placement: RemotePlacement, error: UpstreamAway) -> None:
        """The replica is being stopped or started: that is neither a shed nor a fault of its, and
        as many others may be asked as the moves allow."""
        placement.receipt.lost = str(error)
        placement.replica.away()
        if not placement.member.breaker.closed:
            placement.member.failed()  # it was the breaker's probe
        self._failure = nowhere()
        self._move(placement)

    def _misconfigured(self, placement: RemotePlacement, error: UpstreamMisconfigured) -> None:
        """The replica does not know us, or not what it is asked for."""
        placement.receipt.lost = f"misconfigured: {error}"
        if not placement.member.breaker.closed:
            placement.member.failed()  # it was the breaker's probe
        placement.replica.misconfigured(error.status)
        self._failure = ApiError(
            502,
            "The model's server does not accept this gateway's requests; the operator's log says "
            "why.",
            type="server_error",
            code="upstream_misconfigured",
        )
        self._move(placement)

    def _move(self, placement: RemotePlacement) -> None:
        self._tried.add(placement.member.name)
        self._moved_from = placement.member.name
        if self._moves >= self._terms.moves:
            raise self._failure or nowhere()
        self._moves += 1

    async def _wait_for_another(self, none: NoReplica) -> None:
        """Make sure that asking again may help. Raises ApiError otherwise."""
        failure = self._failure or nowhere()
        if none.full:
            raise nowhere(full=True) from none
        if self._was_full:
            raise failure from none
        if self._tried and self._router.serves:
            await asyncio.sleep(_SAME_AGAIN_S * 2**self._rounds * _jitter.uniform(0.5, 1.5))
            self._rounds += 1
        elif self._moved_from is not None or self._may_start:
            now_s = monotonic()
            if self._deadline_s is None:
                self._deadline_s = now_s + self._terms.recovery_s
            if not await self._router.wait_until_serving(self._deadline_s - now_s):
                raise failure from none
        else:
            raise failure from none
        self._tried.clear()

    @property
    def _may_start(self) -> bool:
        members = self._router.members
        return any(member.health().condition is Condition.STARTING for member in members)


class Visit:
    """A request at one replica, and what becomes of it there; see `Course.at_a_replica`."""

    __slots__ = ("_course", "_had_begun", "_placement")

    def __init__(self, course: Course, had_begun: bool) -> None:
        self._course = course
        self._had_begun = had_begun

    async def __aenter__(self) -> RemotePlacement:
        placement = await self._course._place(self._had_begun)
        self._placement = placement.__enter__()
        self._course._went_to(placement)
        return placement

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            return self._course._noted(self._placement, error)
        finally:
            self._placement.__exit__(kind, error, trace)


def nowhere(*, full: bool = False) -> ApiError:
    """503: no server can take the request now, all being lost or full."""
    return unavailable(
        "Every place at the servers of this model is taken."
        if full
        else "No server of this model can take the request now.",
        code="engine_unavailable",
        retry_after_s=_RETRY_AFTER_S,
    )


def _may_be_the_request(error: UpstreamLost) -> bool:
    """Whether a request can bring such a loss about. The replica is blamed for one only when
    another has answered it, lest one client's requests close a model to all."""
    if error.kind is LossKind.SERVER_ERROR:
        return error.status in (None, 500)
    return error.kind in (LossKind.GARBAGE, LossKind.STALLED)


def _broken_by_request() -> ApiError:
    return ApiError(
        502,
        "This model's servers failed at this request twice.",
        type="server_error",
        code="upstream_error",
    )
