"""The journey of a generating request, from its key to its ledger line.

`Journey.run` reads top to bottom as what happens. Everything acquired on the way belongs to a scope
and is released once, on every path: success, refusal, engine failure, client gone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from time import monotonic

import structlog

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from gateway.admission import ConcurrencyLimits
from gateway.cache_scope import request_chain_root
from gateway.choice import Choice, GenerationFailedError, outputs_of
from gateway.endpoints import Endpoint, Task
from gateway.errors import ApiError, bad_request, internal_error, model_not_found, unavailable
from gateway.http_body import read_body
from gateway.http_call import ClientDisconnectedError, Header, HttpCall
from gateway.http_disconnect import ends_with_client
from gateway.metrics import Metrics
from gateway.prompts import Prompt
from gateway.reload import RuntimeConfig, Snapshot
from gateway.replica import ReplicaUnavailable
from gateway.sampling import choice_params
from gateway.served_model import ServedModel
from gateway.sse import DONE, EventStream, StreamTimes, event
from gateway.tenants import Tenant
from gateway.text_choice import EchoedPrompt, TextChoice, TokenEntry
from gateway.unknown_fields import UnknownFields
from gateway.wire.reply import ReplyFormat, ReplyHead, WholeChoice
from gateway.wire.usage import Usage

_log = structlog.get_logger("forebay.request")

_RETRY_AFTER_S = 1


@dataclass(slots=True)
class Request:
    """One request on its way; what a step finds out stays for the next ones and for the ledger."""

    call: HttpCall
    endpoint: Endpoint
    snapshot: Snapshot
    tenant: Tenant | None = None
    task: Task | None = None
    model: ServedModel | None = None
    prompts: Sequence[Prompt] = ()
    choices: list[Choice] = field(default_factory=list)
    submitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def usage(self) -> Usage:
        """Tokens so far. A prompt's cached tokens are those of its least lucky choice: the others
        may have found what that one computed."""
        cached: dict[int, int] = {}
        for choice in self.choices:
            found = cached.get(choice.prompt_index, choice.cached_tokens)
            cached[choice.prompt_index] = min(found, choice.cached_tokens)
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            cached_tokens=sum(cached.values()),
            completion_tokens=sum(choice.text.generated for choice in self.choices),
        )

    def note_token(self) -> None:
        """An output with tokens has arrived."""
        self.last_token_s = monotonic()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s


class Journey:
    """Takes requests from the HTTP side to the replicas and back. One per application."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        models: Mapping[str, ServedModel],
        metrics: Metrics,
        secret: bytes,
        *,
        times: StreamTimes,
    ) -> None:
        self._runtime = runtime
        self._models = models
        self._metrics = metrics
        self._secret = secret
        self._times = times
        self._limits = ConcurrencyLimits()
        self._unknown_fields = UnknownFields(metrics)

    async def run(self, call: HttpCall, endpoint: Endpoint) -> None:
        """Answer one call. Raises ApiError where the answer has not begun (the caller shows it) or
        has broken off (an error event was sent), and ClientDisconnectedError."""
        request = Request(call, endpoint, self._runtime.current)
        with self._settled(request):
            tenant = request.tenant = authenticate(call, request.snapshot)
            body = await read_body(call, request.snapshot.settings.server.body_limit)
            async with AsyncExitStack() as scope:
                await scope.enter_async_context(ends_with_client(call))
                task = request.task = endpoint.read(body)
                self._unknown_fields.note(task.generation.unknown)
                model = request.model = find_model(self._models, task.generation.model, tenant)
                request.prompts = await task.encode(model)
                choices = self._plan_choices(request, task, model, tenant)
                scope.enter_context(self._limits.slot(tenant))
                scope.enter_context(self._metrics.in_flight(tenant.id))
                await self._submit(request, choices, model, scope)
                reply = self._reply(request, task, model)
                if task.generation.stream:
                    await self._stream(request, reply, task, model)
                else:
                    await self._answer(request, reply, model)

    def _plan_choices(
        self, request: Request, task: Task, model: ServedModel, tenant: Tenant
    ) -> list[Choice]:
        """One engine request per prompt and choice, in OpenAI's order, checked to fit."""
        generation = task.generation
        wants_logprobs = task.logprobs is not None
        # scoring a prompt needs one step of the engine, whose token is not shown
        scores_only = generation.max_tokens == 0
        scores_prompt = task.echo and wants_logprobs
        root = request_chain_root(self._secret, tenant, generation, model)
        run_id = secrets.token_hex(12)
        choices: list[Choice] = []
        for prompt_index, prompt in enumerate(request.prompts):
            params = choice_params(
                generation.sampling,
                model,
                max_tokens=fit_context(prompt, generation.max_tokens, model),
                choices=range(generation.n),
                logprobs=None if scores_only else task.logprobs,
                prompt_logprobs=task.logprobs if scores_prompt else None,
            )
            for own in params:
                index = len(choices)
                engine_request = EngineRequest(
                    request_id=f"{run_id}-{index}",
                    prompt_token_ids=prompt.token_ids,
                    params=own,
                    chain_root=root,
                    read_cache=not scores_prompt,
                )
                text = self._text(task, prompt, own, model, shows_generated=not scores_only)
                choices.append(Choice(index, prompt_index, engine_request, text))
        return choices

    def _text(
        self,
        task: Task,
        prompt: Prompt,
        params: SamplingParams,
        model: ServedModel,
        *,
        shows_generated: bool,
    ) -> TextChoice:
        echoed = None
        if task.echo:
            echoed = EchoedPrompt(
                model.tokenizer,
                prompt.token_ids,
                prompt.text,
                wants_logprobs=params.prompt_logprobs is not None,
            )
        return TextChoice(
            model.tokenizer,
            stops=task.generation.stop,
            wants_logprobs=params.logprobs is not None,
            echoed=echoed,
            shows_generated=shows_generated,
        )

    async def _submit(
        self,
        request: Request,
        choices: Sequence[Choice],
        model: ServedModel,
        scope: AsyncExitStack,
    ) -> None:
        request.submitted_s = monotonic()
        try:
            for choice in choices:
                await scope.enter_async_context(choice)
                await choice.submit(model.replica)
                request.choices.append(choice)
        except ReplicaUnavailable as error:
            raise _unavailable(error) from None

    def _reply(self, request: Request, task: Task, model: ServedModel) -> ReplyFormat:
        head = ReplyHead(
            id=request.endpoint.id_prefix + secrets.token_hex(12),
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

    async def _stream(
        self, request: Request, reply: ReplyFormat, task: Task, model: ServedModel
    ) -> None:
        """One send per wake-up with everything that has arrived; then the end, in one last send.

        What breaks off the generation becomes one error event, without a finish reason and without
        [DONE]: a client that waits for either knows that the answer is not whole.
        """
        failure: ApiError | None = None
        headers = _receipt(request, model)
        async with EventStream(request.call, headers, self._times) as events:
            try:
                unfinished = len(request.choices)
                async with aclosing(outputs_of(request.choices)) as batches:
                    async for batch in batches:
                        frames = bytearray()
                        for choice, output in batch:
                            delta = await choice.advance(output)
                            if output.token_ids:
                                request.note_token()
                            if not choice.opened:
                                choice.opened = True
                                frames += reply.opening(choice.index)
                            if delta.text or delta.entries:
                                frames += reply.delta(choice.index, delta)
                            if delta.finish_reason is not None:
                                frames += reply.final(choice.index, delta.finish_reason)
                                unfinished -= 1
                        if not unfinished:
                            if task.generation.include_usage:
                                frames += reply.usage(request.usage())
                            await events.end(frames + DONE)
                            return
                        if frames:
                            await events.send(frames)
            except ReplicaUnavailable as error:
                failure = _unavailable(error)
            except GenerationFailedError as error:
                failure = _generation_failed(request, error)
            except (ClientDisconnectedError, asyncio.CancelledError):
                raise
            except Exception:
                _log.exception("stream failed", request_id=request.call.request_id)
                failure = internal_error(request.call.request_id)
            failure = failure or internal_error(request.call.request_id)
            await events.end(event(failure.envelope()))
        raise failure

    async def _answer(self, request: Request, reply: ReplyFormat, model: ServedModel) -> None:
        """Wait for every choice, then answer at once."""
        texts: list[list[str]] = [[] for _ in request.choices]
        entries: list[list[TokenEntry]] = [[] for _ in request.choices]
        try:
            async with aclosing(outputs_of(request.choices)) as batches:
                async for batch in batches:
                    for choice, output in batch:
                        delta = await choice.advance(output)
                        if output.token_ids:
                            request.note_token()
                        texts[choice.index].append(delta.text)
                        entries[choice.index] += delta.entries
        except ReplicaUnavailable as error:
            raise _unavailable(error) from None
        except GenerationFailedError as error:
            raise _generation_failed(request, error) from None
        usage = request.usage()
        whole = [
            WholeChoice(
                choice.index,
                "".join(texts[choice.index]),
                entries[choice.index],
                choice.finish_reason,
            )
            for choice in request.choices
            if choice.finish_reason is not None
        ]
        if len(whole) != len(request.choices):
            raise internal_error(request.call.request_id)
        headers = [
            *_receipt(request, model),
            (b"x-forebay-cached-tokens", b"%d" % usage.cached_tokens),
            (b"x-forebay-engine-ms", _ms(request.submitted_s, request.last_token_s)),
        ]
        await request.call.answer(200, reply.whole(whole, usage), headers=headers)

    @contextmanager
    def _settled(self, request: Request) -> Iterator[None]:
        """However the request ends, it ends in the metrics and in one log line."""
        outcome = "error"
        status: int | None = None
        try:
            yield
            outcome, status = "success", 200
        except ApiError as error:
            outcome, status = _outcome(error.status), error.status
            raise
        except (ClientDisconnectedError, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            self._settle(request, outcome, status)

    def _settle(self, request: Request, outcome: str, status: int | None) -> None:
        usage = request.usage()
        ended_s = monotonic()
        started_s = request.call.started_s
        ttft_s = tpot_s = None
        if request.first_token_s is not None and request.last_token_s is not None:
            ttft_s = request.first_token_s - started_s
            gaps = usage.completion_tokens - len(request.choices)
            if gaps > 0:
                # choices run side by side, so each had its share of the gaps
                spread_s = request.last_token_s - request.first_token_s
                tpot_s = spread_s / (gaps / len(request.choices))
        submitted = request.submitted_s is not None
        tenant = request.tenant.id if request.tenant else None
        model = request.model.name if request.model else None
        self._metrics.request_finished(
            tenant=tenant,
            model=model,
            endpoint=request.endpoint.name,
            outcome=outcome,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=ended_s - started_s,
            prompt_tokens=usage.prompt_tokens if submitted else 0,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.completion_tokens,
        )
        _log.info(
            "request",
            request_id=request.call.request_id,
            client=request.call.client_address(request.snapshot.settings.server.trusted_proxies),
            tenant=tenant,
            model=model,
            endpoint=request.endpoint.name,
            outcome=outcome,
            status=status,
            stream=request.task.generation.stream if request.task else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.completion_tokens,
            ttft_ms=round(ttft_s * 1e3, 2) if ttft_s is not None else None,
            e2e_ms=round((ended_s - started_s) * 1e3, 2),
        )


def authenticate(call: HttpCall, snapshot: Snapshot) -> Tenant:
    """Whose key the call carries; raises a 401 ApiError."""
    return snapshot.key_ring.authenticate(call.header("authorization"))


def find_model(models: Mapping[str, ServedModel], name: str, tenant: Tenant) -> ServedModel:
    """The model of this name, if the tenant may use it; otherwise the same 404 in either case."""
    model = models.get(name)
    if model is None or not tenant.may_use(name):
        raise model_not_found()
    return model


def fit_context(prompt: Prompt, max_tokens: int | None, model: ServedModel) -> int:
    """How many tokens may be generated: what was asked for, as far as the context has room.

    Raises a 400 ApiError if the prompt leaves no room for a single one.
    """
    prompt_tokens = len(prompt.token_ids)
    room = model.max_context - prompt_tokens
    if room < 1:
        raise bad_request(
            f"This model's context is {model.max_context} tokens, and the prompt has "
            f"{prompt_tokens}; it must leave room for at least one token.",
            param="prompt" if prompt.text is not None else "messages",
            code="context_length_exceeded",
        )
    return room if max_tokens is None else max(1, min(max_tokens, room))


def _outcome(status: int) -> str:
    if status == 429:
        return "limited"
    if status == 503:
        return "unavailable"
    return "refused" if status < 500 else "error"


def _unavailable(error: ReplicaUnavailable) -> ApiError:
    return unavailable(str(error), code="engine_unavailable", retry_after_s=_RETRY_AFTER_S)


def _generation_failed(request: Request, error: GenerationFailedError) -> ApiError:
    _log.error("generation failed", request_id=request.call.request_id, reason=str(error))
    return internal_error(request.call.request_id)


def _receipt(request: Request, model: ServedModel) -> list[Header]:
    return [
        (b"x-forebay-replica", model.replica.name.encode()),
        (b"x-forebay-queue-ms", _ms(request.call.body_read_s, request.submitted_s)),
    ]


def _ms(start_s: float | None, end_s: float | None) -> bytes:
    if start_s is None or end_s is None:
        return b"0"
    return b"%.2f" % ((end_s - start_s) * 1e3)
