"""Batches of a gateway: open while its models are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex

from gateway.batches.batch_store import BatchStore
from gateway.batches.file_store import FileStore
from gateway.batches.line_runner import LineRunner
from gateway.batches.line_store import LineStore
from gateway.batches.output import OutputWriter
from gateway.batches.progress import BatchProgress
from gateway.batches.runner import BatchRunner, Tempo
from gateway.batches.turns import Clock, database_time
from gateway.batches.validation import Validation
from gateway.database.opening import Transactions
from gateway.ended_tasks import begin_task, end_task
from gateway.errors import unavailable
from gateway.models import Models
from gateway.reload import RuntimeConfig
from gateway.tenants import Caller

_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Batches:
    """What the API answers from, and who does the work."""

    files: FileStore
    batches: BatchStore
    runner: BatchRunner


class LateBatches:
    """Stands for what is still being opened."""

    def __init__(self) -> None:
        self._batches: Batches | None = None

    def use(self, batches: Batches) -> None:
        """It is open."""
        self._batches = batches

    def stop_taking(self) -> None:
        """Begin no more lines here; what runs goes on."""
        if self._batches is not None:
            self._batches.runner.stop_taking()

    @property
    def opened(self) -> Batches:
        """What is open; raises a 503 ApiError where nothing is."""
        if self._batches is None:
            raise unavailable(
                "There is no database for files and batches yet.",
                code="database_unavailable",
                retry_after_s=5,
            )
        return self._batches


@asynccontextmanager
async def open_batches(
    database: Transactions,
    models: Models,
    runtime: RuntimeConfig,
    line_runner: LineRunner,
    *,
    clock: Clock = database_time,
    tempo: Tempo = Tempo(),  # noqa: B008 - frozen
) -> AsyncIterator[Batches]:
    """Take part in running everybody's batches, until the scope ends: then lines that still run are
    cut off and left to other gateways, or to this one's next start. `Batches.runner.drain` gives
    them time before.

    Whose batches run, and how, is what `runtime` says at each moment. The database need not answer.
    """

    def find_caller(tenant: str, key: str) -> Caller | None:
        caller = runtime.current.key_ring.caller(key)
        return caller if caller is not None and caller.tenant.id == tenant else None

    owner = token_hex(16)
    files = FileStore(database, clock)
    lines = LineStore(database, clock, owner)
    progress = BatchProgress(database, clock, owner)
    runner = BatchRunner(
        files,
        lines,
        progress,
        Validation(database, files, progress, models),
        OutputWriter(database, files, lines, progress),
        line_runner,
        find_caller,
        lambda: runtime.current.settings,
        tempo,
    )
    task = begin_task(runner.run(), "batches")
    try:
        yield Batches(files, BatchStore(database, clock), runner)
    finally:
        runner.stop()
        await asyncio.wait([task], timeout=_STOP_S)
        await end_task(task)
