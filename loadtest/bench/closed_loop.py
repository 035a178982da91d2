"""The closed loop: so many clients, each sending its next request when its last is answered."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.bench.completion import Completion, Failure, completion_body, read_stream
from loadtest.bench.workloads import Workload
from loadtest.target import Target
from loadtest.wire.connection import Answer, ExchangeError, connect


@dataclass(frozen=True, slots=True)
class LoopOutcome:
    """What a closed loop brought, in the order of sending, and the time from its first request to
    the end of its last answer (0 if there was none)."""

    results: tuple[Completion | Failure, ...]
    wall_s: float


async def run_closed_loop(target: Target, workload: Workload, seed: int) -> LoopOutcome:
    """Send the whole workload. A request that fails is a Failure in its place and ends nothing.

    Requests are written before the first is sent and answers read after the last has come, so that
    as little as can be of the client's work falls into the measured time.
    """
    sends = workload.sends(seed, target.vocabulary)
    requests = [
        target.endpoint.request(
            "POST",
            target.completions_path,
            completion_body(target.model, send.prompt, workload.output_tokens),
        )
        for send in sends
    ]
    answers = await exchange_all(target, requests, workload.concurrency)
    whole = [answer for answer in answers if isinstance(answer, Answer)]
    return LoopOutcome(
        results=tuple(
            Failure(send.pass_name, answer)
            if isinstance(answer, str)
            else read_stream(
                answer,
                pass_name=send.pass_name,
                prompt_tokens=workload.prompt_tokens,
                output_tokens=workload.output_tokens,
            )
            for send, answer in zip(sends, answers, strict=True)
        ),
        wall_s=max(answer.ended_at_s for answer in whole)
        - min(answer.sent_at_s for answer in whole)
        if whole
        else 0.0,
    )


async def exchange_all(
    target: Target, requests: Sequence[bytes], concurrency: int
) -> list[Answer | str]:
    """Send requests in a closed loop: each one's answer, or the line that says why there is none.
    Every client has a connection of its own, which it opens with its first request."""
    answers: list[Answer | str] = ["not sent"] * len(requests)
    queue = iter(enumerate(requests))

    async def client(queue: Iterator[tuple[int, bytes]]) -> None:
        async with connect(target.endpoint) as connection:
            for index, request in queue:
                try:
                    answers[index] = await connection.exchange(request, target.timeout_s)
                except ExchangeError as error:
                    answers[index] = str(error)

    # A full collection takes milliseconds that would be counted as the server's.
    gc.collect()
    gc.disable()
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(requests))):
                clients.create_task(client(queue))
    finally:
        gc.enable()
    return answers
