"""One request's outputs between whoever receives them and the task that consumes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from engine.request import EngineOutput, FinishReason
from gateway.replica import ReplicaUnavailable


class Inbox:
    """A stream of outputs for one consumer, filled and read on one event loop.

    Outputs that nobody has taken yet are handed over as one, so that a slow consumer costs memory
    in the order of its answer's tokens and gets fewer, larger pieces.
    """

    __slots__ = ("_loop", "_lost", "_pending", "_waiter", "ended")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended = False
        self._lost: tuple[str, bool] | None = None
        self._loop = loop
        self._pending: list[EngineOutput] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: EngineOutput, *, alive: bool) -> None:
        """Add an output. One that ends the request without its owner's doing means that it is lost:
        an abort because the engine was stopped, an error because it died (`alive` False)."""
        reason = output.finish_reason
        if reason is FinishReason.ABORT or (reason is FinishReason.ERROR and not alive):
            self.lose(
                "The engine stopped before the answer was complete.",
                blames_replica=reason is FinishReason.ERROR,
            )
            return
        self._pending.append(output)
        if reason is not None:
            self.ended = True
        self._wake()

    def end(self) -> None:
        """Nothing more will come: the owner has left."""
        self.ended = True
        self._wake()

    def lose(self, why: str, *, blames_replica: bool) -> None:
        """Nothing more will come, and the answer is not complete: behind what has come already, the
        consumer gets ReplicaUnavailable. Nothing happens to a stream that has ended."""
        if not self.ended:
            self._lost = (why, blames_replica)
            self.end()

    def __aiter__(self) -> AsyncIterator[EngineOutput]:
        return self

    async def __anext__(self) -> EngineOutput:
        while not self._pending:
            if self._lost is not None:
                why, blames_replica = self._lost
                raise ReplicaUnavailable(why, blames_replica=blames_replica)
            if self.ended:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._pending = self._pending, []
        return outputs[0] if len(outputs) == 1 else joined(outputs)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def joined(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """Several outputs of one request as if one step had produced them."""
    last = outputs[-1]
    prompt_logprobs = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    cache_uses = [output.cache_use for output in outputs if output.cache_use is not None]
    return EngineOutput(
        request_id=last.request_id,
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        cached_tokens=last.cached_tokens,
        finish_reason=last.finish_reason,
        stopped_by_token=last.stopped_by_token,
        error=last.error,
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
        cache_use=cache_uses[0] if cache_uses else None,
        made_s=last.made_s,
    )
