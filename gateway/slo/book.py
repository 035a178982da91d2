"""Keeps account of how tenants' promises were kept, over a window of time."""

from __future__ import annotations

from typing import Protocol

from gateway.tenants import Tenant
from policies.slo import LatestTimes


class SloBook(Protocol):
    """Belongs to the event loop; metrics read it from any thread."""

    def note(
        self,
        tenant: Tenant,
        model: str,
        *,
        promised: bool,
        ttft_s: float | None,
        tpot_s: float | None,
        publish_s: float | None,
        at_most: LatestTimes | None = None,
    ) -> bool | None:
        """A request that was let in is over, other than by its client's leaving. Whether it was
        answered as promised; None where nothing was (`promised` False: it ran in another class).

        `at_most` is for an answer of which only the end was seen: what its times cannot have been
        longer than. Such a one kept the promise where these do, and else nobody can say.
        """
        ...

    def shed(self, tenant: Tenant, model: str, *, promised: bool = True) -> None:
        """A request was refused for want of capacity (503). `promised` as in `note`: then it counts
        as one that did not get it."""
        ...

    def weight_of(self, tenant: Tenant) -> float:
        """The tenant's weight as its error budget has it now: more while it burns too fast."""
        ...
