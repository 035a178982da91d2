"""Writing a batch's output and error files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import NamedTuple

import orjson
import structlog

from gateway.batches.batch import Batch
from gateway.batches.file_draft import FileDraft
from gateway.batches.file_store import FileStore
from gateway.batches.line_store import EndedLine, LineKey, LineState, LineStore
from gateway.batches.progress import FINISHING, BatchProgress
from gateway.batches.stored_file import OUTPUT, StoredFile
from gateway.database.opening import Transactions
from gateway.sse import json_line

_log = structlog.get_logger("forebay.batch")

_READ_AT_ONCE = 32
_FORGOTTEN_AT_ONCE = 1000


class _Drafts(NamedTuple):
    output: FileDraft
    errors: FileDraft


class OutputWriter:
    """Writes the files of batches of which no line will be run any more."""

    def __init__(
        self, database: Transactions, files: FileStore, lines: LineStore, progress: BatchProgress
    ) -> None:
        self._database = database
        self._files = files
        self._lines = lines
        self._progress = progress

    async def run(self, batch: Batch, file_ttl_s: float) -> None:
        """End the batch; it must have been claimed. Raises LeaseLost."""
        await self._progress.end_lines(batch)
        async with AsyncExitStack() as scope:
            drafts = _Drafts(
                await scope.enter_async_context(await self._files.draft()),
                await scope.enter_async_context(await self._files.draft()),
            )
            last = await self._write(batch, drafts)
            async with self._database.begin() as connection:
                now_s = await self._progress.hold(connection, batch.id, *FINISHING)
                expires_s = now_s + file_ttl_s
                for draft, kind in zip(drafts, ("output", "error"), strict=True):
                    if draft.size_bytes:
                        file = StoredFile(
                            draft.id,
                            batch.tenant,
                            f"{batch.id}_{kind}.jsonl",
                            OUTPUT,
                            draft.size_bytes,
                            now_s,
                            expires_s,
                        )
                        await draft.publish(connection, file)
                output, errors = (draft.id if draft.size_bytes else None for draft in drafts)
                await self._progress.end(connection, batch, output, errors)
        _log.info("batch ended", batch=batch.id, tenant=batch.tenant, lines=batch.total)
        for first in range(1, last + 1, _FORGOTTEN_AT_ONCE):
            await self._lines.forget_results(batch.id, first, first + _FORGOTTEN_AT_ONCE - 1)

    async def _write(self, batch: Batch, drafts: _Drafts) -> int:
        """Every line into one of the files, in order; the number of the last one."""
        last = 0
        while ended := await self._lines.ended(batch.id, last, _READ_AT_ONCE):
            async with self._database.begin() as connection:
                await self._progress.hold(connection, batch.id, *FINISHING)
            for line in ended:
                well = line.result.state is LineState.COMPLETED
                draft = drafts.output if well else drafts.errors
                await draft.write(_as_jsonl(batch.id, line))
            last = ended[-1].number
        for draft in drafts:
            await draft.end()
        return last


def line_id(key: LineKey) -> str:
    """What a line is called in the batch's files and in the log."""
    return f"batch_req_{key.batch.removeprefix('batch_')}_{key.number}"


def _as_jsonl(batch_id: str, line: EndedLine) -> bytes:
    response, error = line.result.response, line.result.error
    values: Mapping[str, object] = {
        "id": line_id(LineKey(batch_id, line.number)),
        "custom_id": line.custom_id,
        "response": None if response is None else orjson.Fragment(response),
        "error": None if error is None else orjson.Fragment(error),
    }
    return json_line(values) + b"\n"
