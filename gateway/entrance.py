"""The way in for what has been understood: limits are reserved, then capacity is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace

from gateway.choice import Choice
from gateway.demand import Ask, demand_of, used_tokens
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import NoReplica
from gateway.dispatch.run import route_request
from gateway.endpoints import Task
from gateway.models import AnyModel
from gateway.outcome import is_charged, outcome_of
from gateway.request import Request
from gateway.tenancy import Tenancy
from gateway.tenants import Caller
from policies.limits import Limits


class Entrance:
    """Lets requests in, to models of our own and to remote ones alike."""

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy

    async def let_in(
        self,
        request: Request,
        model: AnyModel,
        asks: Sequence[Ask],
        scope: AsyncExitStack,
        *,
        may_downgrade: bool = False,
    ) -> Receipt | None:
        """Reserve what the request may use, for as long as the scope lasts, and wait until there is
        room for it. Returns where its first prompt was to go before that, None where nothing
        served.

        Raises a 429 ApiError where a limit of its tenant is reached, a 503 where it would not get
        its first token in time, and Downgrade, if that is allowed, where its tenant wants it to run
        on another model then. A request that is not let in has spent nothing.
        """
        caller = request.caller
        if caller is None:
            raise AssertionError("a request is let in once it is known whose it is")
        tenant = caller.tenant
        receipts = foresee(model, asks)
        first = receipts[0]
        settings = request.snapshot.settings
        request.price = self._tenancy.model_terms.price(settings, model.name)
        demand = demand_of(
            asks,
            [0 if each is None else each.candidate.cached.tokens for each in receipts],
            tenant,
            request.price,
            usual_answer_tokens=0 if first is None else first.candidate.standing.answer_tokens,
            batch=bool(request.batch),
        )
        limited = budget_only(caller) if request.batch else caller
        downgrade_to = tenant.slo.downgrade_to
        with ExitStack() as entering:
            reservation = await self._tenancy.limiter.reserve(limited, model.name, demand)
            entering.enter_context(reservation)
            await self._tenancy.admission.admit(
                tenant,
                model.router,
                asks[0],
                request.terms,
                max_queue_s=self._tenancy.model_terms.max_queue_s(settings, model.name),
                receipt=first,
                may_downgrade=may_downgrade
                and downgrade_to is not None
                and tenant.may_use(downgrade_to),
            )
            request.reservation = reservation
            scope.push(entering.pop_all().__exit__)
        scope.push(lambda _kind, error, _trace: _settle(request, error))
        return first


def _settle(request: Request, error: BaseException | None) -> None:
    """The last word on what was reserved, once nothing of the request runs any more."""
    outcome, _ = outcome_of(error)
    charged = is_charged(outcome, batch=bool(request.batch))
    if request.reservation is None or request.tenant is None or not charged:
        return
    usage = request.usage()
    request.reservation.settle(used_tokens(usage, request.tenant), request.cost_nusd(usage))


def asks_of(choices: Sequence[Choice], task: Task) -> list[Ask]:
    """One for each prompt of a task that has been planned."""
    says_length = task.generation.max_tokens is not None
    return [
        Ask(
            route_request(choice.request),
            choice.prefix,
            task.generation.n,
            says_length,
            max((each.tokens for each in choice.request.retention), default=0),
        )
        for choice in {each.prompt_index: each for each in reversed(choices)}.values()
    ][::-1]


def foresee(model: AnyModel, asks: Sequence[Ask]) -> list[Receipt | None]:
    """Where each prompt would go now, and what it would find there; None where nothing serves."""
    receipts: list[Receipt | None] = []
    for ask in asks:
        try:
            receipts.append(model.router.decide(ask.route, ask.prefix))
        except NoReplica:
            receipts.append(None)
    return receipts


def budget_only(caller: Caller) -> Caller:
    """For batches: they have their own limit of tokens in line, and cost money like others."""
    tenant = replace(
        caller.tenant,
        limits=_budget_of(caller.tenant.limits),
        model_limits={
            name: _budget_of(limits) for name, limits in caller.tenant.model_limits.items()
        },
    )
    return Caller(tenant, replace(caller.key, limits=_budget_of(caller.key.limits)))


def _budget_of(limits: Limits) -> Limits:
    return Limits(budget_nusd=limits.budget_nusd, budget_per=limits.budget_per)
