"""The journey of a generating request: `Journey.run` reads top to bottom as what happens.

Everything acquired on the way belongs to a scope and is released once, on every path: success,
refusal, engine failure, client gone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from time import monotonic

from gateway.cache_scope import cache_terms
from gateway.cached_content import with_cached_content
from gateway.choice import Choice
from gateway.delivery import engine_unavailable, stream_answer, whole_answer
from gateway.demand import Ask
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import NoReplica
from gateway.dispatch.run import MoveTerms, route_request
from gateway.endpoints import CHAT, COMPLETIONS, Endpoint, Task
from gateway.entrance import Entrance, asks_of
from gateway.http_body import read_body
from gateway.http_call import HttpCall
from gateway.http_disconnect import ends_with_client
from gateway.included import is_asked_for
from gateway.ledger.price_answer import wants_price
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.named_caches import NamedCaches
from gateway.places import ConcurrencyLimits
from gateway.plan import plan_choices
from gateway.recent_requests import RecentRequests
from gateway.reload import RuntimeConfig, Snapshot
from gateway.remote.relay import explain_relay, relay
from gateway.replica import ReplicaUnavailable
from gateway.request import Request
from gateway.served_model import ServedModel
from gateway.settlement import settled
from gateway.shared_prefixes import SharedPrefixes
from gateway.slo.admission import Downgrade
from gateway.sse import StreamTimes
from gateway.tenancy import Tenancy
from gateway.tenants import Caller, Tenant
from gateway.terms import Flows, read_terms
from gateway.unknown_fields import UnknownFields
from gateway.wire.json_body import parse_object
from gateway.wire.reply import ReplyFormat, ReplyHead
from gateway.wire.usage import ASKED_TIERS


class Journey:
    """Takes requests from the HTTP side to the replicas and back. One per application."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        models: Models,
        metrics: Metrics,
        secret: bytes,
        times: StreamTimes,
        named: NamedCaches,
        tenancy: Tenancy,
        recent: RecentRequests | None = None,
    ) -> None:
        """`recent` remembers how the last requests met the cache; None: nobody does."""
        self._runtime = runtime
        self._models = models
        self._metrics = metrics
        self._secret = secret
        self._times = times
        self._named = named
        self._recent = recent
        self._tenancy = tenancy
        self._entrance = Entrance(tenancy)
        self._flows = Flows(secret)
        self._places = ConcurrencyLimits(metrics.limits.note_no_place)
        self._shared_prefixes = SharedPrefixes(secret)
        self._unknown_fields = UnknownFields(metrics)

    async def run(self, call: HttpCall, endpoint: Endpoint) -> None:
        """Answer one call.

        Raises ApiError where the answer has not begun, which the caller then shows, or where it has
        broken off, which the client has been told; and ClientDisconnectedError.
        """
        await self._run(Request(call, endpoint.name, self._runtime.current), endpoint)

    async def run_line(
        self, call: HttpCall, endpoint: Endpoint, caller: Caller, batch: str
    ) -> None:
        """Answer one line of a batch as `run` does a call, for whoever made the batch."""
        request = Request(call, endpoint.name, self._runtime.current, caller=caller, batch=batch)
        await self._run(request, endpoint)

    async def _run(self, request: Request, endpoint: Endpoint) -> None:
        call = request.call
        with settled(request, self._metrics, self._tenancy, self._recent):
            tenant = request.authenticate()
            body = await read_body(call, request.snapshot.settings.server.body_limit)
            if not request.batch:
                # it may have taken as long to come as its client liked
                self._runtime.current.key_ring.require(request.caller)
            async with ends_with_client(call):
                peer = request.read_peer(body, self._secret)
                owner = request.cache_owner or tenant
                values = parse_object(body)
                self.set_terms(request, tenant, values.get("service_tier"))
                request.wants_price = wants_price(call)
                request.wants_tiers = is_asked_for(call, ASKED_TIERS)
                if peer is not None:
                    request.terms = request.terms.as_peers(peer, self._flows.of(peer.id))
                try:
                    await self._answer(request, endpoint, values, tenant, owner)
                except Downgrade as other:
                    wanted = str(values["model"])
                    values = {**values, "model": other.model}
                    await self._answer(request, endpoint, values, tenant, owner, instead_of=wanted)

    async def _answer(
        self,
        request: Request,
        endpoint: Endpoint,
        values: Mapping[str, object],
        tenant: Tenant,
        owner: Tenant,
        *,
        instead_of: str | None = None,
    ) -> None:
        """By the model that `values` name, or what stands in for it: they name it `instead_of` the
        one that the client has asked for where it was downgraded. Raises Downgrade, before the
        answer has begun, for one that is to run on another; once."""
        async with AsyncExitStack() as scope:
            if (remote := self._models.choose_remote(values.get("model"), tenant)) is not None:
                request.model = remote
                self.take_place(request, tenant, scope)

                async def let_in(asks: Sequence[Ask]) -> Receipt | None:
                    return await self._entrance.let_in(
                        request, remote, asks, scope, may_downgrade=instead_of is None
                    )

                await relay(
                    request, endpoint, values, remote, owner, self._secret, self._times, let_in
                )
                return
            task = request.task = endpoint.read(values)
            self._unknown_fields.note(task.generation.unknown)
            wanted = task.generation.model if instead_of is None else instead_of
            model = self._models.choose_served(task.generation.model, tenant)
            request.model = model
            # before tokenizing: that is work which a tenant must not have done without limit
            self.take_place(request, tenant, scope)
            asked = self._models.own_name(wanted)
            task = request.task = await with_cached_content(task, tenant, model, asked, self._named)
            request.prompts = await task.encode(model)
            await self.submit(request, task, tenant, model, scope, may_downgrade=instead_of is None)
            reply = self._reply(request, endpoint, task, model)
            if task.generation.stream:
                await stream_answer(
                    request, reply, self._times, include_usage=task.generation.include_usage
                )
            else:
                await whole_answer(request, reply)

    def set_terms(self, request: Request, tenant: Tenant, tier: object = None) -> None:
        """On what terms the request runs, by its tenant, its headers and its `service_tier`. Raises
        a 400 ApiError."""
        terms = read_terms(
            request.call,
            tier,
            tenant,
            flow=self._flows.of(tenant.id),
            weight=self._tenancy.slo.weight_of(tenant),
        )
        request.terms = terms.as_batch() if request.batch else terms

    def take_place(self, request: Request, tenant: Tenant, scope: AsyncExitStack) -> None:
        """Take one of the tenant's places in this process for as long as the scope lasts; a 429 if
        all are taken. Whatever of the tenant's runs on a replica goes through here; batches have
        places of their own."""
        if not request.batch:
            scope.enter_context(self._places.slot(tenant))
        scope.enter_context(self._metrics.in_flight(tenant.id))

    async def submit(
        self,
        request: Request,
        task: Task,
        tenant: Tenant,
        model: ServedModel,
        scope: AsyncExitStack,
        *,
        may_downgrade: bool = False,
    ) -> None:
        """Let the request in and hand its prompts to the replica; its choices end with the scope at
        the latest.

        Raises a 400 ApiError for what the model cannot take, a 429 where the tenant is at one of
        its limits, a 503 where the replicas are full or gone; and Downgrade, if that is allowed.
        """
        choices = await self._plan(request, task, request.cache_owner or tenant, model)
        asks = asks_of(choices, task)
        await self._entrance.let_in(request, model, asks, scope, may_downgrade=may_downgrade)
        await self._submit(request, choices, model, scope)

    async def explain(
        self, call: HttpCall, values: dict[str, object], tenant: Tenant, snapshot: Snapshot
    ) -> list[Receipt]:
        """Where the request with this body would go, for each of its prompts: a dry run.

        Raises the ApiErrors that running it would.
        """
        endpoint = CHAT if "messages" in values else COMPLETIONS
        request = Request(call, endpoint.name, snapshot, tenant=tenant)
        self.set_terms(request, tenant, values.get("service_tier"))
        if (remote := self._models.choose_remote(values.get("model"), tenant)) is not None:
            return [await explain_relay(endpoint, values, remote, tenant, request.terms)]
        task = endpoint.read(values)
        model = self._models.choose_served(task.generation.model, tenant)
        asked = self._models.own_name(task.generation.model)
        task = await with_cached_content(task, tenant, model, asked, self._named)
        request.prompts = await task.encode(model)
        by_prompt = {c.prompt_index: c for c in await self._plan(request, task, tenant, model)}
        try:
            return [
                model.router.decide(route_request(choice.request), choice.prefix)
                for choice in by_prompt.values()
            ]
        except NoReplica as nowhere:
            raise engine_unavailable(ReplicaUnavailable(str(nowhere))) from nowhere

    async def _plan(
        self, request: Request, task: Task, tenant: Tenant, model: ServedModel
    ) -> list[Choice]:
        cache = cache_terms(self._secret, tenant, task.generation, model)
        declared = request.snapshot.settings.shared_prefixes
        shared = await self._shared_prefixes.of(model, declared)
        return plan_choices(task, request.prompts, model, cache, shared, request.terms)

    async def _submit(
        self, request: Request, choices: list[Choice], model: ServedModel, scope: AsyncExitStack
    ) -> None:
        routing = request.snapshot.settings.routing
        terms = MoveTerms(routing.moves, routing.recovery_s)
        request.submitted_s = monotonic()
        try:
            for choice in choices:
                await scope.enter_async_context(choice)
                await choice.submit(model.router, terms)
                request.choices.append(choice)
        except ReplicaUnavailable as error:
            raise engine_unavailable(error) from error

    def _reply(
        self, request: Request, endpoint: Endpoint, task: Task, model: ServedModel
    ) -> ReplyFormat:
        head = ReplyHead(
            id=endpoint.id_prefix + secrets.token_hex(12),
            created=int(time.time()),
            model=model.name,
            system_fingerprint="fp_" + model.fingerprint[:12],
            service_tier=request.terms.served_tier,
        )
        return task.reply(
            head,
            model.tokenizer,
            include_usage=task.generation.include_usage,
            wants_logprobs=task.logprobs is not None,
        )
