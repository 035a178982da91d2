"""One choice of an answer: an engine request while it runs, and the text that comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

from cache.report import CacheUse
from engine.request import EngineOutput, EngineRequest, FinishReason
from gateway.dispatch.prefix import UNKNOWN, Prefix
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import Router
from gateway.dispatch.run import MoveTerms, Run
from gateway.replica import Replica, TokenStream
from gateway.replicas.inbox import joined
from gateway.text_choice import Delta, TextChoice


class GenerationFailedError(Exception):
    """The engine gave up on one request; the message is its own and for the log only."""


class Choice:
    """Leaving its scope ends it wherever it is.

    `cache_use` is how its prompt met the cache: said once, with the first token, and None until
    then.
    """

    def __init__(
        self,
        index: int,
        prompt_index: int,
        request: EngineRequest,
        text: TextChoice,
        prefix: Prefix = UNKNOWN,
    ) -> None:
        """`prefix` is how the directory knows the beginning of its prompt."""
        self.index = index
        self.prompt_index = prompt_index
        self.request = request
        self.text = text
        self.prefix = prefix
        self.outputs: TokenStream
        self.opened = False
        self.finish_reason: str | None = None
        self.cache_use: CacheUse | None = None
        self.receipts: list[Receipt] = []
        self._scope = AsyncExitStack()

    async def submit(self, router: Router[Replica], terms: MoveTerms) -> None:
        """Start it where it will get its first token soonest; raises ReplicaUnavailable.

        `receipts` grow with every replica that it is sent to.
        """
        run = Run(router, self.request, self.prefix, terms)
        self.receipts = run.receipts
        self.outputs = await self._scope.enter_async_context(run)

    @property
    def replica(self) -> str:
        """Where it runs, or ran last; empty before it was submitted."""
        return self.receipts[-1].candidate.name if self.receipts else ""

    async def __aenter__(self) -> Choice:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._scope.aclose()

    async def advance(self, output: EngineOutput) -> Delta:
        """Take one output in; at the end of the choice, free what the engine holds for it.

        Raises GenerationFailedError if the engine gave up on it.
        """
        if output.finish_reason is FinishReason.ERROR:
            raise GenerationFailedError(output.error or "unknown")
        if self.cache_use is None:
            self.cache_use = output.cache_use
        delta = self.text.feed(output)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            await self._scope.aclose()
        return delta


async def outputs_of(
    choices: Sequence[Choice],
) -> AsyncGenerator[list[tuple[Choice, EngineOutput]], None]:
    """Every choice's outputs as they come; what has come by the time one looks comes together, each
    choice's as one.

    Choices that are over are skipped. Raises ReplicaUnavailable when the engine is lost. Must be
    closed (`aclosing`) when left early.
    """
    if len(choices) == 1:
        (choice,) = choices
        async for output in choice.outputs:
            yield [(choice, output)]
            if choice.finish_reason is not None:
                return
        return
    arrivals: asyncio.Queue[tuple[Choice, EngineOutput | Exception | None]] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async for output in choice.outputs:
                arrivals.put_nowait((choice, output))
        except Exception as error:  # noqa: BLE001 - raised again by whoever consumes
            arrivals.put_nowait((choice, error))
        else:
            arrivals.put_nowait((choice, None))

    pumps = [asyncio.create_task(pump(choice)) for choice in choices]
    running = len(pumps)
    try:
        while running and any(choice.finish_reason is None for choice in choices):
            arrived = [await arrivals.get()]
            while not arrivals.empty():
                arrived.append(arrivals.get_nowait())
            outputs: dict[Choice, list[EngineOutput]] = {}
            failures: list[tuple[Choice, Exception]] = []
            for choice, item in arrived:
                if isinstance(item, EngineOutput):
                    outputs.setdefault(choice, []).append(item)
                    continue
                running -= 1
                if item is not None:
                    failures.append((choice, item))
            # whoever consumes may find that one of them ends the choice: nothing may follow it
            batch = [
                (choice, own[0] if len(own) == 1 else joined(own))
                for choice, own in outputs.items()
                if choice.finish_reason is None
            ]
            if batch:
                yield batch
            for choice, failure in failures:
                if choice.finish_reason is None:
                    raise failure
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)
