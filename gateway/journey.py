"""The journey of a generating request: `Journey.run` reads top to bottom as what happens.

Everything acquired on the way belongs to a scope and is released once, on every path: success,
refusal, engine failure, client gone.
"""

from __future__ import annotations

import secrets
import time
from contextlib import AsyncExitStack
from time import monotonic

from gateway.admission import ConcurrencyLimits
from gateway.cache_scope import cache_terms
from gateway.cached_content import with_cached_content
from gateway.choice import Choice
from gateway.delivery import engine_unavailable, stream_answer, whole_answer
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import NoReplica
from gateway.dispatch.run import MoveTerms, route_request
from gateway.endpoints import CHAT, COMPLETIONS, Endpoint, Task
from gateway.http_body import read_body
from gateway.http_call import HttpCall
from gateway.http_disconnect import ends_with_client
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.named_caches import NamedCaches
from gateway.plan import plan_choices
from gateway.recent_requests import RecentRequests
from gateway.reload import RuntimeConfig, Snapshot
from gateway.remote.relay import explain_relay, relay
from gateway.replica import ReplicaUnavailable
from gateway.request import Request
from gateway.served_model import ServedModel
from gateway.settlement import settled
from gateway.shared_prefixes import SharedPrefixes
from gateway.sse import StreamTimes
from gateway.tenants import Tenant
from gateway.unknown_fields import UnknownFields
from gateway.wire.json_body import parse_object
from gateway.wire.reply import ReplyFormat, ReplyHead


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
        self._limits = ConcurrencyLimits()
        self._shared_prefixes = SharedPrefixes(secret)
        self._unknown_fields = UnknownFields(metrics)

    async def run(self, call: HttpCall, endpoint: Endpoint) -> None:
        """Answer one call.

        Raises ApiError where the answer has not begun, which the caller then shows, or where it has
        broken off, which the client has been told; and ClientDisconnectedError.
        """
        request = Request(call, endpoint.name, self._runtime.current)
        with settled(request, self._metrics, self._recent):
            tenant = request.authenticate()
            body = await read_body(call, request.snapshot.settings.server.body_limit)
            async with ends_with_client(call), AsyncExitStack() as scope:
                owner = request.read_peer(body, self._secret)
                values = parse_object(body)
                if (remote := self._models.choose_remote(values.get("model"), tenant)) is not None:
                    request.model = remote
                    self.admit(tenant, scope)
                    await relay(request, endpoint, values, remote, owner, self._secret, self._times)
                    return
                task = request.task = endpoint.read(values)
                self._unknown_fields.note(task.generation.unknown)
                model = self._models.choose_served(task.generation.model, tenant)
                request.model = model
                # before tokenizing: that is work which a tenant must not have done without limit
                self.admit(tenant, scope)
                task = request.task = await with_cached_content(task, tenant, model, self._named)
                request.prompts = await task.encode(model)
                await self.submit(request, task, tenant, model, scope)
                reply = self._reply(endpoint, task, model)
                if task.generation.stream:
                    await stream_answer(
                        request,
                        reply,
                        self._times,
                        include_usage=task.generation.include_usage,
                    )
                else:
                    await whole_answer(request, reply)

    def admit(self, tenant: Tenant, scope: AsyncExitStack) -> None:
        """Take one of the tenant's places for as long as the scope lasts; a 429 if all are taken.
        Whatever of the tenant's runs on a replica goes through here."""
        scope.enter_context(self._limits.slot(tenant))
        scope.enter_context(self._metrics.in_flight(tenant.id))

    async def submit(
        self,
        request: Request,
        task: Task,
        tenant: Tenant,
        model: ServedModel,
        scope: AsyncExitStack,
    ) -> None:
        """Hand the request's prompts to the replica; its choices end with the scope at the latest.

        Raises a 400 ApiError for what the model cannot take, a 503 where the replica is full or
        gone.
        """
        choices = await self._plan(request, task, request.cache_owner or tenant, model)
        await self._submit(request, choices, model, scope)

    async def explain(
        self, call: HttpCall, values: dict[str, object], tenant: Tenant, snapshot: Snapshot
    ) -> list[Receipt]:
        """Where the request with this body would go, for each of its prompts: a dry run.

        Raises the ApiErrors that running it would.
        """
        endpoint = CHAT if "messages" in values else COMPLETIONS
        if (remote := self._models.choose_remote(values.get("model"), tenant)) is not None:
            return [await explain_relay(endpoint, values, remote, tenant)]
        request = Request(call, endpoint.name, snapshot, tenant)
        task = endpoint.read(values)
        model = self._models.choose_served(task.generation.model, tenant)
        task = await with_cached_content(task, tenant, model, self._named)
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
        terms = cache_terms(self._secret, tenant, task.generation, model)
        declared = request.snapshot.settings.shared_prefixes
        shared = await self._shared_prefixes.of(model, declared)
        return plan_choices(task, request.prompts, model, terms, shared)

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

    def _reply(self, endpoint: Endpoint, task: Task, model: ServedModel) -> ReplyFormat:
        head = ReplyHead(
            id=endpoint.id_prefix + secrets.token_hex(12),
            created=int(time.time()),
            model=model.name,
            system_fingerprint="fp_" + model.fingerprint[:12],
        )
        return task.reply(
            head,
            model.tokenizer,
            include_usage=task.generation.include_usage,
            wants_logprobs=task.logprobs is not None,
        )
