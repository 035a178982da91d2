"""Bodies, queries and answers of /v1/batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.batches.batch import Batch, BatchPage, BatchStatus, Counts
from gateway.batches.batch_store import MOST_OPEN_BATCHES
from gateway.batches.line_check import ENDPOINTS
from gateway.errors import ApiError, bad_request, limit_exceeded
from gateway.wire.fields import Fields
from gateway.wire.files import page_card, read_after, read_limit
from gateway.wire.json_body import parse_object

WINDOW = "24h"
WINDOW_S = 86_400.0
_BATCH_ENDS_S = 60
_MOST_METADATA = 16
_LONGEST_KEY = 64
_LONGEST_VALUE = 512


@dataclass(frozen=True, slots=True)
class NewBatch:
    """The body that makes a batch. `unknown` are names that no field of it has."""

    input_file: str
    endpoint: str
    metadata: Mapping[str, str]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Which batches to list."""

    after: str | None
    limit: int


def read_new_batch(body: bytes | bytearray) -> NewBatch:
    """Validate it; raises the 400 that names the field which is wrong."""
    fields = Fields(parse_object(body))
    input_file = fields.required_string("input_file_id")
    endpoint = fields.required_string("endpoint")
    if endpoint not in ENDPOINTS:
        raise fields.wrong("endpoint", f"must be one of {', '.join(ENDPOINTS)}.")
    if fields.required_string("completion_window") != WINDOW:
        raise fields.wrong("completion_window", f"must be {WINDOW}.")
    if fields.value("output_expires_after") is not None:
        raise fields.wrong("output_expires_after", "is not supported by this server; leave it out.")
    return NewBatch(input_file, endpoint, _read_metadata(fields), tuple(fields.unread()))


def _read_metadata(fields: Fields) -> Mapping[str, str]:
    values = fields.value("metadata")
    if values is None:
        return {}
    if not isinstance(values, dict) or len(values) > _MOST_METADATA:
        raise fields.wrong("metadata", f"must be an object of at most {_MOST_METADATA} fields.")
    for key, value in values.items():
        if len(key) > _LONGEST_KEY:
            raise fields.wrong("metadata", f"must have keys of up to {_LONGEST_KEY} characters.")
        if not isinstance(value, str) or len(value) > _LONGEST_VALUE:
            raise fields.wrong(
                "metadata", f"must have strings of up to {_LONGEST_VALUE} characters as its values."
            )
    return values


def read_listing(query: Mapping[str, str]) -> Listing:
    """From a list's query; raises the 400 that names the parameter which is wrong."""
    return Listing(read_after(query, "batch_"), read_limit(query, 20, 100))


def batch_card(batch: Batch, counts: Counts) -> dict[str, object]:
    """One batch."""
    errors = [
        {"code": each.code, "line": each.line, "message": each.message, "param": each.param}
        for each in batch.errors
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        "completion_window": WINDOW,
        "status": batch.status.value,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": int(batch.created_s),
        "in_progress_at": _at(batch.in_progress_s),
        "expires_at": int(batch.expires_s),
        "finalizing_at": _at(batch.finalizing_s),
        "completed_at": _at(batch.completed_s),
        "failed_at": _at(batch.failed_s),
        # noted when the window was over, and true once its files are there
        "expired_at": _at(batch.expired_s) if batch.status is BatchStatus.EXPIRED else None,
        "cancelling_at": _at(batch.cancelling_s),
        "cancelled_at": _at(batch.cancelled_s),
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
        },
        "metadata": dict(batch.metadata) or None,
    }


def batch_list(page: BatchPage) -> dict[str, object]:
    """Some batches."""
    cards = [batch_card(batch, counts) for batch, counts in page.batches]
    return page_card(cards, has_more=page.has_more)


def batch_not_found() -> ApiError:
    """404: none of this id, one that is forgotten, or somebody else's; all look the same."""
    return ApiError(
        404,
        "There is no batch of this id; GET /v1/batches lists them.",
        param="batch_id",
        code="batch_not_found",
    )


def no_input_file() -> ApiError:
    """400: what was named as a batch's input is none."""
    return bad_request(
        "input_file_id must be the id of a file with the purpose batch; GET /v1/files lists them.",
        param="input_file_id",
        code="file_not_found",
    )


def too_many_batches() -> ApiError:
    """429: others must end first."""
    return limit_exceeded(
        f"This tenant has {MOST_OPEN_BATCHES} batches that have not ended.",
        code="batch_limit_exceeded",
        retry_after_s=_BATCH_ENDS_S,
    )


def cannot_cancel(status: BatchStatus) -> ApiError:
    """409: it is too late."""
    return ApiError(
        409, f"A batch that is {status.value} cannot be cancelled.", code="batch_not_cancellable"
    )


def _at(moment_s: float | None) -> int | None:
    return None if moment_s is None else int(moment_s)
