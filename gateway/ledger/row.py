"""A row of the ledger, and who takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """See `gateway.database.schema.requests`: the fields are its columns."""

    id: str
    request_id: str
    started_s: float
    finished_s: float
    tenant: str
    key: str
    model: str
    endpoint: str
    service_class: str
    outcome: str
    status: int | None
    streamed: bool
    prompt_tokens: int
    cached_device_tokens: int
    cached_dram_tokens: int
    cached_redis_tokens: int
    written_tokens: int
    output_tokens: int
    cost_nusd: int
    e2e_s: float
    queue_s: float | None = None
    ttft_s: float | None = None
    publish_s: float | None = None
    tpot_s: float | None = None
    met_slo: bool | None = None
    replica: str = ""
    batch: str = ""
    kind: Literal["request", "storage"] = "request"
    token_hours: float = 0.0


class Ledger(Protocol):
    """Takes rows from the event loop and has them written soon after."""

    def note(self, row: LedgerRow) -> None:
        """One request is over. Never blocks or raises; a row of an id that is there already is
        dropped."""
        ...


class NoLedger:
    """Writes nothing down."""

    def note(self, row: LedgerRow) -> None:
        """Nobody keeps it."""
