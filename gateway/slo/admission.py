"""Admission by predicted time: a request is let in, waits, runs on another model, or is told when
to come again. All of that comes before the first byte of an answer."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

from gateway.demand import Ask
from gateway.dispatch.member import Routable
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import NoReplica, Router
from gateway.errors import ApiError, unavailable
from gateway.slo.line import Line, Waiter
from gateway.slo.waiting_room import WaitingRoom
from gateway.tenants import Tenant
from gateway.terms import TIMEOUT, Terms
from policies.admission import (
    ADMITTED,
    Reason,
    Ruling,
    Verdict,
    Wish,
    judge,
    judge_full,
    judge_waiting,
    until_place_s,
)
from policies.routing import Prediction

MOST_WAITING = 1024
MOST_WAITING_TOKENS = 4 << 20
"""Of prompts. With the text that they were made of, about 64 MiB."""

_REFUSALS: dict[Reason, tuple[str, str]] = {
    "slo": (
        "slo_unattainable",
        "This request would not get its first token as soon as its tenant was promised.",
    ),
    "timeout": (
        "slo_unattainable",
        f"This request would not get its first token within its own {TIMEOUT}.",
    ),
    "work": ("capacity_exceeded", "Too much work is waiting in front of this model."),
    "places": ("capacity_exceeded", "Every place in the queues of this model is taken."),
}


class OwnDeadline(ApiError):
    """The 503 of a request that has left less time than it takes: that is no want of room."""


class Downgrade(Exception):
    """The request is to run on the model that its tenant has named for such times."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class Admission:
    """One per gateway, for all its models. Belongs to the event loop.

    A request that is in time goes in at once, past those who wait: they are late already, or have
    to be let past for another reason, and it would be late if it waited for them. Who has had more
    than its share is predicted to wait for the others, and so is the one who waits here or is
    refused.
    """

    def __init__(
        self,
        *,
        most_waiting: int = MOST_WAITING,
        most_waiting_tokens: int = MOST_WAITING_TOKENS,
    ) -> None:
        """See `WaitingRoom`, which says who goes beyond that."""
        self.rulings: Counter[tuple[str, Verdict, Reason]] = Counter()
        """How often what was decided about a request of each model, and why; of one that was told
        to QUEUE also what came of it, if that was to be refused."""
        self._room = WaitingRoom(most_waiting, most_waiting_tokens)
        self._lines: dict[str, Line] = {}
        self._waiting: dict[Waiter, Line] = {}

    @property
    def waiting(self) -> dict[str, int]:
        """How many wait in front of each model at which anybody has waited. Any thread."""
        return {model: len(line) for model, line in list(self._lines.items())}

    async def admit(
        self,
        tenant: Tenant,
        router: Router[Routable],
        ask: Ask,
        terms: Terms,
        *,
        max_queue_s: float,
        receipt: Receipt | None = None,
        may_downgrade: bool = True,
    ) -> None:
        """Return when the request is to be sent to one of the router's replicas: at once, since its
        load counts from then on only.

        Of several prompts, `ask` is the first. `receipt` is what the router has just decided about
        it, if it was asked. `max_queue_s` bounds the work in front of it.

        Raises Downgrade, if `may_downgrade`, or a 503 ApiError with a true `Retry-After`
        (`slo_unattainable`, `capacity_exceeded`). Where no replica serves at all, the request is
        let through: whoever sends it knows what may be waited for.
        """
        case = _Case(tenant, router, ask, terms, max_queue_s)
        ruling = case.judge(receipt)
        self._count(router, ruling)
        downgrade_to = tenant.slo.downgrade_to
        if ruling.verdict is Verdict.DOWNGRADE and may_downgrade and downgrade_to is not None:
            raise Downgrade(downgrade_to)
        if ruling.verdict is Verdict.QUEUE:
            ruling = await self._wait(case, ruling)
            if ruling.verdict is not Verdict.ADMIT:
                ruling = ruling._replace(verdict=Verdict.SHED)
                self._count(router, ruling)
        if ruling.verdict is not Verdict.ADMIT:
            raise _refusal(ruling)

    def _count(self, router: Router[Routable], ruling: Ruling) -> None:
        self.rulings[router.model, ruling.verdict, ruling.reason] += 1

    async def _wait(self, case: _Case, ruling: Ruling) -> Ruling:
        """What was found when its turn came, or when its time was over."""
        terms, model = case.terms, case.router.model
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = Line(case.router)
        waiter = Waiter(
            priority=terms.priority,
            flow=terms.flow,
            weight=terms.weight,
            due_s=math.inf if terms.deadline_s is None else terms.deadline_s,
            tokens=case.ask.route.prompt_tokens,
            judge=case.judge_waiting,
            ruling=ruling,
        )
        rest_s = case.tenant.slo.max_queue_s
        if terms.timeout_at_s is not None:
            rest_s = min(rest_s, terms.timeout_at_s - monotonic())
        if rest_s <= 0 or not self._make_room(waiter):
            return ruling
        line.add(waiter)
        self._waiting[waiter] = line
        self._room.add(waiter)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await waiter.turn
        finally:
            self._leave(waiter)
        return waiter.ruling

    def _leave(self, waiter: Waiter) -> None:
        """Idempotent."""
        line = self._waiting.pop(waiter, None)
        if line is not None:
            self._room.remove(waiter)
            line.remove(waiter)

    def _make_room(self, newcomer: Waiter) -> bool:
        """Whether one more may wait; if need be, others go for it."""
        leaving = self._room.who_goes(newcomer)
        for waiter in leaving or ():
            self._leave(waiter)
            if not waiter.turn.done():
                waiter.ruling = waiter.ruling._replace(verdict=Verdict.SHED, reason="places")
                waiter.turn.set_result(None)
        return leaving is not None


@dataclass(frozen=True, slots=True)
class _Case:
    """One request, and what it wants to get into."""

    tenant: Tenant
    router: Router[Routable]
    ask: Ask
    terms: Terms
    max_queue_s: float

    def judge(self, receipt: Receipt | None) -> Ruling:
        """As one who has just come."""
        wish = self._wish()
        try:
            receipt = receipt or self.router.decide(self.ask.route, self.ask.prefix)
        except NoReplica as nowhere:
            return self._nowhere(wish, nowhere)
        return judge(_corrected(self.router, receipt), wish)

    def judge_waiting(self) -> Ruling:
        """As one who has waited."""
        wish = self._wish()
        due_s = None if self.terms.deadline_s is None else self.terms.deadline_s - monotonic()
        try:
            receipt = self.router.decide(replace(self.ask.route, due_s=due_s), self.ask.prefix)
        except NoReplica as nowhere:
            return self._nowhere(wish, nowhere)
        return judge_waiting(_corrected(self.router, receipt), wish)

    def _wish(self) -> Wish:
        terms, on_overload = self.terms, self.tenant.slo.on_overload
        if on_overload == "downgrade" and terms.ttft_s is None:
            on_overload = "reject"  # nothing was promised that another model could keep
        return Wish(
            ttft_s=terms.ttft_s,
            timeout_s=None if terms.timeout_at_s is None else terms.timeout_at_s - terms.started_s,
            elapsed_s=monotonic() - terms.started_s,
            max_queue_s=self.max_queue_s,
            on_overload=on_overload,
        )

    def _nowhere(self, wish: Wish, nowhere: NoReplica) -> Ruling:
        if not nowhere.full:
            return ADMITTED
        priority = self.terms.priority
        waits_s = [
            until_place_s(
                member.load.standing(), member.replica.coefficients(), member.load.places(priority)
            )
            for member in self.router.members
            if member.takes_requests()
        ]
        return judge_full(wish, min(waits_s, default=0.0))


def _corrected(router: Router[Routable], receipt: Receipt) -> Prediction:
    """What was predicted, times what predictions for requests like this one have lately been off
    by at this replica."""
    candidate = receipt.candidate
    bias = router.bias(candidate.name, receipt.request, receipt.decided_s)
    queue_s, load_s, prefill_s = receipt.predict(candidate)
    return Prediction(bias * queue_s, bias * load_s, bias * prefill_s)


def _refusal(ruling: Ruling) -> ApiError:
    code, message = _REFUSALS[ruling.reason]
    refusal = unavailable(message, code=code, retry_after_s=ruling.retry_after_s)
    if ruling.reason == "timeout":
        return OwnDeadline(
            refusal.status, message, type=refusal.type, code=code, headers=refusal.headers
        )
    return refusal
