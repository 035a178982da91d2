"""A request's way to the servers that run its model, and the answer's way back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from time import monotonic
from typing import NoReturn

from gateway.deadline import OutOfTime, in_time, out_of_time
from gateway.demand import Ask
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import NoReplica
from gateway.dispatch.run import MoveTerms
from gateway.endpoints import Endpoint
from gateway.errors import ApiError, unavailable
from gateway.http_call import Header
from gateway.ledger.price_answer import cost_header, priced_usage
from gateway.remote.attempt import Attempt, Errand
from gateway.remote.body import read_body
from gateway.remote.chunks import Chunks
from gateway.remote.course import Course, Route, nowhere
from gateway.remote.model import RemoteModel
from gateway.remote.outlet import Outlet
from gateway.remote.prompt import routed_prompt
from gateway.remote.streaming import relay_stream
from gateway.remote.transcript import AnswerDiffers
from gateway.remote.usage import Priced, ReportedUsage
from gateway.remote.whole import WholeAnswer, read_whole
from gateway.request import Relayed, Request
from gateway.sse import StreamTimes, event
from gateway.tenants import Tenant
from gateway.terms import Terms

LetIn = Callable[[Sequence[Ask]], Awaitable[Receipt | None]]
"""Lets the request in, or raises the ApiError that it is refused with. Returns what the router has
decided about its first prompt meanwhile, if anything."""

_SEED_BITS = 31
_seeds = Random()
"""Seeds need to differ, not to be secret."""


async def relay(
    request: Request,
    endpoint: Endpoint,
    values: Mapping[str, object],
    model: RemoteModel,
    tenant: Tenant,
    secret: bytes,
    times: StreamTimes,
    let_in: LetIn,
) -> None:
    """Answer an authenticated request whose body is `values`, once `let_in` has let it in; `tenant`
    is whose KV it may share.

    Raises ApiError where the answer has not begun, or where it has broken off, which the client has
    been told. `request.relayed` is kept up to date, however it ends.
    """
    body = read_body(values, endpoint.name)
    cache = model.isolation.terms(tenant, body)
    prompt = await routed_prompt(body, model, cache.chain_root)
    ask = prompt.ask(body, request.terms)
    foreseen = await let_in([Ask(ask, prompt.prefix, body.choices, body.max_tokens is not None)])
    relayed = request.relayed = Relayed(choices=body.choices, stream=body.stream)
    routing = request.snapshot.settings.routing
    course = Course(
        model.router,
        Route(ask, prompt.prefix, foreseen),
        MoveTerms(routing.moves, routing.recovery_s),
        relayed.receipts,
        request.call.request_id,
    )
    errand = Errand(
        body=body,
        prompt=prompt,
        tenant=tenant,
        request_id=request.call.request_id,
        salt=cache.salt,
        alone=cache.chain_root is None,
        seed=_seeds.getrandbits(_SEED_BITS),
        secret=secret,
        terms=request.terms,
    )
    request.submitted_s = monotonic()
    if body.stream:
        await _stream(request, course, errand, model, times)
    else:
        await _whole(request, course, errand, model)


async def explain_relay(
    endpoint: Endpoint,
    values: Mapping[str, object],
    model: RemoteModel,
    tenant: Tenant,
    terms: Terms,
) -> Receipt:
    """Where a request with this body would go: a dry run. Raises the ApiErrors that it would."""
    body = read_body(values, endpoint.name)
    prompt = await routed_prompt(body, model, model.isolation.terms(tenant, body).chain_root)
    try:
        return model.router.decide(prompt.ask(body, terms), prompt.prefix)
    except NoReplica as none:
        raise nowhere(full=none.full) from none


async def _whole(request: Request, course: Course, errand: Errand, model: RemoteModel) -> None:
    """Nothing has gone to the client until all is there: whatever is lost is asked for again."""
    answer: WholeAnswer | None = None
    try:
        async with in_time(request.terms):
            while answer is None:
                async with course.at_a_replica(had_begun=False) as placement:
                    _note_sent(request, errand)
                    answer = await read_whole(
                        Attempt(errand, placement, course.predicted_ttft_s),
                        model.name,
                        request.terms.served_tier,
                        _priced(request),
                    )
    except OutOfTime:
        raise out_of_time() from None
    _note_usage(request, answer.usage)
    cached = 0 if answer.usage is None else answer.usage.cached_tokens or 0
    headers = _receipt(request, course)
    if request.shows_receipt:
        headers.append((b"x-forebay-cached-tokens", b"%d" % cached))
    if request.wants_price and answer.usage is not None:
        headers.append(cost_header(request.cost_nusd(request.usage())))
    await request.call.answer(200, answer.body, headers=headers)


async def _stream(
    request: Request, course: Course, errand: Errand, model: RemoteModel, times: StreamTimes
) -> None:
    """Event by event. What breaks the answer off is told by one error event, as for a model of our
    own (`gateway.delivery`)."""
    chunks = Chunks(errand.body, model.name, request.terms.served_tier, _priced(request))
    async with Outlet(request.call, lambda: _receipt(request, course), times) as outlet:
        try:
            async with in_time(request.terms):
                await _pass_on(request, course, errand, chunks, outlet)
            _note_usage(request, chunks.usage)
        except AnswerDiffers as differs:
            await _break_off(outlet, _cannot_go_on(), differs)
        except OutOfTime:
            await _break_off(outlet, out_of_time(), None)
        except ApiError as failure:
            await _break_off(outlet, failure, None)


async def _pass_on(
    request: Request, course: Course, errand: Errand, chunks: Chunks, outlet: Outlet
) -> None:
    whole = False
    while not whole:
        async with course.at_a_replica(had_begun=chunks.has_content) as placement:
            _note_sent(request, errand)
            await relay_stream(
                Attempt(errand, placement, course.predicted_ttft_s), chunks, outlet, request
            )
            whole = True
        if not whole:
            chunks.begin_again()


async def _break_off(outlet: Outlet, failure: ApiError, cause: Exception | None) -> NoReturn:
    if outlet.opened:
        await outlet.end(event(failure.envelope()))
    raise failure from cause


def _note_sent(request: Request, errand: Errand) -> None:
    """A server has the prompt: that much is used, whoever leaves before the server says so."""
    if request.relayed is not None:
        request.relayed.prompt_tokens = errand.prompt.tokens


def _note_usage(request: Request, usage: ReportedUsage | None) -> None:
    """What the server said that it cost; where it said nothing, what was counted stays."""
    relayed = request.relayed
    if relayed is None:
        return
    if usage is None:
        return
    relayed.prompt_tokens = usage.prompt_tokens
    relayed.cached_tokens = usage.cached_tokens or 0
    relayed.completion_tokens = usage.completion_tokens


def _priced(request: Request) -> Priced | None:
    """How the client's usage says what it costs; None if the client did not ask."""
    if not request.wants_price:
        return None

    def priced(usage: ReportedUsage) -> ReportedUsage:
        _note_usage(request, usage)
        return usage._replace(wire=priced_usage(usage.wire, request.cost_nusd(request.usage())))

    return priced


def _receipt(request: Request, course: Course) -> list[Header]:
    """As of our own models (`gateway.delivery`)."""
    if not request.shows_receipt:
        return list(request.limit_headers)
    receipts = request.relayed.receipts if request.relayed is not None else []
    headers = list(request.limit_headers)
    headers.append((b"x-forebay-queue-ms", _ms(request.call.body_read_s, request.submitted_s)))
    if receipts:
        headers.append((b"x-forebay-replica", receipts[-1].candidate.name.encode()))
        predicted_ms = course.predicted_ttft_s * 1e3
        headers.append((b"x-forebay-predicted-ttft-ms", b"%.2f" % predicted_ms))
    return headers


def _ms(start_s: float | None, end_s: float | None) -> bytes:
    if start_s is None or end_s is None:
        return b"0.00"
    return b"%.2f" % ((end_s - start_s) * 1e3)


def _cannot_go_on() -> ApiError:
    return unavailable(
        "The server that ran this request was lost, and no other could go on with its answer.",
        code="engine_unavailable",
        retry_after_s=1,
    )
