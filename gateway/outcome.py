"""How a request ended, by what ended it."""

from __future__ import annotations

import asyncio

from gateway.errors import ApiError
from gateway.http_call import ClientDisconnectedError

_CHARGED = frozenset({"success", "cancelled", "expired"})


def is_charged(outcome: str, *, batch: bool = False) -> bool:
    """Whether its tenant pays for it. What fails through our fault is written down, and costs
    nothing; so does a line of a `batch` that was cut off, since it is run again."""
    return outcome == "success" if batch else outcome in _CHARGED


def outcome_of(error: BaseException | None) -> tuple[str, int | None]:
    """One of `gateway.metrics.OUTCOMES`, and the status if there is one."""
    if error is None:
        return "success", 200
    if isinstance(error, ApiError):
        return _outcome_of_status(error.status), error.status
    if isinstance(error, ClientDisconnectedError | asyncio.CancelledError):
        return "cancelled", None
    return "error", None


def _outcome_of_status(status: int) -> str:
    if status == 429:
        return "limited"
    if status == 503:
        return "unavailable"
    if status == 504:
        return "expired"
    return "refused" if status < 500 else "error"
