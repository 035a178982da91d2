"""A batch as tenants see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Row


class BatchStatus(StrEnum):
    """As OpenAI's API names them.

    ```
    VALIDATING ──► IN_PROGRESS ──► FINALIZING ──► COMPLETED
        │  │           │  └─ (window over) ─┘ └─► EXPIRED
        │  └───────────┴──► CANCELLING ─────────► CANCELLED
        └──► FAILED
    ```
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


OPEN = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)
"""Those that something is still to be done for."""


class BatchError(NamedTuple):
    """What is wrong with a batch's input, in which of its lines (from 1) and which field."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(NamedTuple):
    """Lines: all of them, and those that have ended well or badly."""

    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch. `key` is the id of the key that made it, times are Unix seconds; `expired_s` is
    when its window was found to be over, before its files were written."""

    id: str
    tenant: str
    key: str
    endpoint: str
    input_file: str
    output_file: str | None
    error_file: str | None
    status: BatchStatus
    metadata: Mapping[str, str]
    errors: tuple[BatchError, ...]
    created_s: float
    expires_s: float
    in_progress_s: float | None
    finalizing_s: float | None
    completed_s: float | None
    failed_s: float | None
    expired_s: float | None
    cancelling_s: float | None
    cancelled_s: float | None
    total: int


class BatchPage(NamedTuple):
    """Some of a tenant's batches with their counts, and whether there are more behind them."""

    batches: list[tuple[Batch, Counts]]
    has_more: bool


def batch_of(row: Row[Any]) -> Batch:
    """The batch in a row of its table."""
    return Batch(
        id=row.id,
        tenant=row.tenant,
        key=row.key,
        endpoint=row.endpoint,
        input_file=row.input_file,
        output_file=row.output_file,
        error_file=row.error_file,
        status=BatchStatus(row.status),
        metadata=orjson.loads(row.metadata),
        errors=tuple(BatchError(*each) for each in orjson.loads(row.errors)),
        created_s=row.created_s,
        expires_s=row.expires_s,
        in_progress_s=row.in_progress_s,
        finalizing_s=row.finalizing_s,
        completed_s=row.completed_s,
        failed_s=row.failed_s,
        expired_s=row.expired_s,
        cancelling_s=row.cancelling_s,
        cancelled_s=row.cancelled_s,
        total=row.total,
    )


def errors_text(errors: tuple[BatchError, ...]) -> str:
    """As `batch_of` reads them."""
    return orjson.dumps([list(each) for each in errors]).decode()
