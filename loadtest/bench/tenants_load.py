"""What tenants send, and what becomes of it: answered, turned away before it began, or given up."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from loadtest.bench.campaign import CampaignError
from loadtest.bench.completion import Completion, Failure, completion_body, read_stream, refusal
from loadtest.target import Target
from loadtest.wire.connection import Answer, Connection, ExchangeError, connect
from policies.slo import Slo

_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class Shape:
    """How long a prompt and its answer are."""

    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Offer:
    """What is sent to whom, and when: seconds from the beginning, one for each request. Its client
    waits for a whole answer for `patience_s` and no longer."""

    target: Target
    shape: Shape
    at_s: Sequence[float]
    patience_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one request, on the clock of `time.perf_counter`. `answer` is None if it was
    turned away for want of room (`shed`), or if its client gave up."""

    sent_at_s: float
    ended_at_s: float
    answer: Completion | None
    shed: bool = False

    def kept(self, slo: Slo) -> bool:
        """Whether it was answered as promised, by its client's clock."""
        return self.answer is not None and slo.met(self.answer.ttft_s, self.answer.tpot_s)


async def send(offer: Offer, seed: str, until: asyncio.Event | None = None) -> list[Fate]:
    """Send all of it, or what comes before `until` is set, and wait for the ends.

    Raises CampaignError for an answer that is neither whole nor a 503 which says when to come
    again.
    """
    fates: list[Fate] = []
    free: list[Connection] = []
    began_s = time.perf_counter()
    async with AsyncExitStack() as opened, side_by_side() as sent:

        async def exchange(request: bytes) -> None:
            connection = (
                free.pop()
                if free
                else await opened.enter_async_context(connect(offer.target.endpoint))
            )
            fates.append(await _fate(connection, request, offer))
            free.append(connection)

        requests = _requests(offer.target, offer.shape, seed)
        for at_s in offer.at_s:
            if await _is_set_within(until, began_s + at_s - time.perf_counter()):
                break
            sent.create_task(exchange(next(requests)))
    return fates


async def send_in_turn(
    target: Target, shape: Shape, clients: int, seconds: float, seed: str
) -> list[Fate]:
    """So many clients, each sending its next request when its last is over, for so long; the last
    ones are waited for. Raises CampaignError as `send` does."""
    fates: list[Fate] = []
    requests = _requests(target, shape, seed)
    offer = Offer(target, shape, ())
    until_s = time.perf_counter() + seconds

    async def client() -> None:
        async with connect(target.endpoint) as connection:
            while time.perf_counter() < until_s:
                fates.append(await _fate(connection, next(requests), offer))

    async with side_by_side() as running:
        for _ in range(clients):
            running.create_task(client())
    return fates


@asynccontextmanager
async def side_by_side() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the CampaignError of a task as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        ours, others = errors.split(CampaignError)
        if ours is None or others is not None:
            raise
        raise _first_of(ours) from None


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage is collected: that takes milliseconds which would be counted as the server's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _first_of(errors: BaseExceptionGroup[CampaignError]) -> CampaignError:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def _requests(target: Target, shape: Shape, seed: str) -> Iterator[bytes]:
    """Without end: streamed completions of random prompts, the same for the same seed."""
    draw = random.Random(seed)
    vocabulary = range(*target.vocabulary)
    while True:
        prompt = draw.choices(vocabulary, k=shape.prompt_tokens)
        body = completion_body(target.model, prompt, shape.output_tokens)
        yield target.endpoint.request("POST", target.completions_path, body)


async def _fate(connection: Connection, request: bytes, offer: Offer) -> Fate:
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(offer.patience_s):
            # its own time limit would end the bench: it is for servers that hang
            answer = await connection.exchange(request, offer.patience_s + offer.target.timeout_s)
    except TimeoutError:
        return Fate(began_s, time.perf_counter(), None)
    except ExchangeError as error:
        raise CampaignError(f"{offer.target.name}: {error}") from None
    if answer.status == _UNAVAILABLE:
        _check_retry_after(answer, offer.target)
        return Fate(answer.sent_at_s, answer.ended_at_s, None, shed=True)
    read = read_stream(
        answer,
        pass_name="",
        prompt_tokens=offer.shape.prompt_tokens,
        output_tokens=offer.shape.output_tokens,
    )
    if isinstance(read, Failure):
        raise CampaignError(f"{offer.target.name}: {read.reason}")
    return Fate(answer.sent_at_s, answer.ended_at_s, read)


def _check_retry_after(answer: Answer, target: Target) -> None:
    after = answer.headers.get("retry-after", "")
    if not after.isdigit() or int(after) < 1:
        raise CampaignError(f"{target.name}: no Retry-After in whole seconds; {refusal(answer)}")


async def _is_set_within(event: asyncio.Event | None, after_s: float) -> bool:
    """Wait so long, or until the event is set: whether it is."""
    if event is None:
        await asyncio.sleep(after_s)
        return False
    try:
        async with asyncio.timeout(max(0.0, after_s)):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
