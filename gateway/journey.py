"""The journey of a generating request: `Journey.run` reads top to bottom as what happens.

Everything acquired on the way belongs to a scope and is released once, on every path: success,
refusal, engine failure, client gone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from time import monotonic

from gateway.admission import ConcurrencyLimits
from gateway.cache_scope import cache_terms
from gateway.cached_content import with_cached_content
from gateway.choice import Choice
from gateway.delivery import engine_unavailable, stream_answer, whole_answer
from gateway.endpoints import Endpoint, Task
from gateway.http_body import read_body
from gateway.http_call import HttpCall
from gateway.http_disconnect import ends_with_client
from gateway.ledger import settled
from gateway.metrics import Metrics
from gateway.named_caches import NamedCaches
from gateway.plan import plan_choices
from gateway.recent_requests import RecentRequests
from gateway.reload import RuntimeConfig
from gateway.replica import ReplicaUnavailable
from gateway.request import Request
from gateway.served_model import ServedModel, find_model
from gateway.shared_prefixes import SharedPrefixes
from gateway.sse import StreamTimes
from gateway.tenants import Tenant
from gateway.unknown_fields import UnknownFields
from gateway.wire.reply import ReplyFormat, ReplyHead


class Journey:
    """Takes requests from the HTTP side to the replicas and back. One per application."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        models: Mapping[str, ServedModel],
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
            async with AsyncExitStack() as scope:
                await scope.enter_async_context(ends_with_client(call))
                task = request.task = endpoint.read(body)
                self._unknown_fields.note(task.generation.unknown)
                model = request.model = find_model(self._models, task.generation.model, tenant)
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
                        model,
                        self._times,
                        include_usage=task.generation.include_usage,
                    )
                else:
                    await whole_answer(request, reply, model)

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
        terms = cache_terms(self._secret, tenant, task.generation, model)
        declared = request.snapshot.settings.shared_prefixes
        shared = await self._shared_prefixes.of(model, declared)
        choices = plan_choices(task, request.prompts, model, terms, shared)
        await self._submit(request, choices, model, scope)

    async def _submit(
        self, request: Request, choices: list[Choice], model: ServedModel, scope: AsyncExitStack
    ) -> None:
        request.submitted_s = monotonic()
        try:
            for choice in choices:
                await scope.enter_async_context(choice)
                await choice.submit(model.replica)
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
