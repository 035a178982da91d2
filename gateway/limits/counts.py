"""What a limiter has done, for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.limit_standing import DIMENSIONS


@dataclass(frozen=True, slots=True)
class LimitCounts:
    """A snapshot. `refused` is by dimension, with `too_large` for requests that never fit.

    `degraded` is whether something of what limits need cannot be asked; `outages` are times that
    Redis was lost, `journal` what it is yet to be told, `replayed` the batches told after outages,
    `memory_losses` the times that it came back without what it had been told of a tenant.
    """

    refused: Mapping[str, int]
    degraded: bool = False
    outages: int = 0
    journal: int = 0
    replayed: int = 0
    memory_losses: int = 0
    ledger_failures: int = 0
    accounts: int = 0


TOO_LARGE = "too_large"


def no_refusals() -> dict[str, int]:
    """Every kind, none of which has been."""
    return dict.fromkeys((*DIMENSIONS, TOO_LARGE), 0)
