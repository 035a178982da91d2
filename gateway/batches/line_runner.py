"""The seam between batches and what answers their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.batches.line_answer import LineAnswer
from gateway.tenants import Caller


class LineRunner(Protocol):
    """Answers a line as if a client had sent it."""

    async def run(
        self,
        caller: Caller,
        endpoint_path: str,
        body: dict[str, object],
        *,
        batch_id: str,
        line_id: str,
    ) -> LineAnswer:
        """Runs in the class `batch`, at its price. `line_id` stays the same when a line is run
        again. What it raises is treated as a failure of ours; it may be cancelled."""
        ...


FindCaller = Callable[[str, str], Caller | None]
"""From the ids of a tenant and of one of its keys to both, as they are now; None if either is gone
or the key has expired."""
