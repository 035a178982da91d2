"""Checking a batch's input, and writing down its lines."""

from __future__ import annotations

import asyncio
from time import monotonic

import structlog

from gateway.batches.batch import Batch, BatchError, BatchStatus
from gateway.batches.file_store import FileStore
from gateway.batches.input_lines import input_lines
from gateway.batches.line_check import LineCheck, LineRefused
from gateway.batches.line_store import NewLine, add_lines
from gateway.batches.progress import BatchProgress, LeaseLost
from gateway.batches.turns import is_away
from gateway.database.opening import Transactions
from gateway.models import Models
from gateway.settings import Settings
from gateway.tenants import Tenant

_log = structlog.get_logger("forebay.batch")

_MOST_ERRORS = 100
_CHUNK_LINES = 500
_CHUNK_BYTES = 1 << 20
_TURN_S = 0.002
"""How long checking may keep the event loop before others have their turn."""


class Validation:
    """Validates batches; what it writes is part of a batch only once all of it is right."""

    def __init__(
        self, database: Transactions, files: FileStore, progress: BatchProgress, models: Models
    ) -> None:
        self._database = database
        self._files = files
        self._progress = progress
        self._models = models

    async def run(self, batch: Batch, tenant: Tenant, settings: Settings) -> None:
        """Begin the batch or fail it; it must have been claimed. Raises LeaseLost."""
        try:
            lines, tokens, errors = await self._read(batch, tenant, settings)
            begun = not errors and await self._progress.begin(
                batch, lines, tokens, tenant.enqueued_tokens
            )
        except LeaseLost:
            raise
        except Exception as error:
            if is_away(error):
                raise
            _log.exception("a batch could not be validated", batch=batch.id)
            wrong = BatchError("internal_error", "The batch could not be validated.")
            await self._progress.fail(batch, (wrong,))
            return
        if errors:
            await self._progress.fail(batch, tuple(errors))
        elif not begun:
            full = BatchError(
                "token_limit_exceeded",
                f"This tenant's batches may have {tenant.enqueued_tokens} tokens in line, and with "
                f"the up to {tokens} of this one there would be more. Try again when others have "
                "ended.",
            )
            await self._progress.fail(batch, (full,))

    async def _read(
        self, batch: Batch, tenant: Tenant, settings: Settings
    ) -> tuple[int, int, list[BatchError]]:
        """Check every line and write it down: how many lines and tokens there are, and what is
        wrong."""
        await self._progress.clear(batch)
        check = LineCheck(self._models, tenant, batch.endpoint)
        most_lines = settings.batch.max_lines
        errors: list[BatchError] = []
        chunk: list[NewLine] = []
        lines = tokens = chunk_bytes = 0
        turn_ends_s = monotonic() + _TURN_S
        content = self._files.content(batch.input_file)
        async for line in input_lines(content, settings.server.body_limit):
            lines += 1
            if lines > most_lines:
                too_many = f"A batch may have at most {most_lines} lines."
                errors.append(BatchError("too_many_lines", too_many, line.number))
                break
            try:
                new = check.check(line)
            except LineRefused as refused:
                errors.append(refused.error)
                if len(errors) == _MOST_ERRORS:
                    break
            else:
                tokens += new.tokens
                chunk.append(new)
                chunk_bytes += len(new.body)
            if len(chunk) >= _CHUNK_LINES or chunk_bytes >= _CHUNK_BYTES:
                await self._store(batch, chunk)
                chunk, chunk_bytes = [], 0
            if monotonic() >= turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = monotonic() + _TURN_S
        if not lines:
            errors.append(BatchError("empty_file", "The input file holds no requests."))
        if not errors:
            await self._store(batch, chunk)
        return lines, tokens, errors

    async def _store(self, batch: Batch, chunk: list[NewLine]) -> None:
        async with self._database.begin() as connection:
            await self._progress.hold(connection, batch.id, BatchStatus.VALIDATING)
            await add_lines(connection, batch.id, chunk)
