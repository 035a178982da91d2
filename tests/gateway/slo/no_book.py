"""A book that judges and remembers nothing."""

from __future__ import annotations

from gateway.tenants import Tenant
from policies.slo import LatestTimes


class NoSloBook:
    """Nobody was promised anything."""

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
        """Judged, and forgotten."""
        return tenant.slo.judged(ttft_s, tpot_s, at_most) if promised else None

    def shed(self, tenant: Tenant, model: str, *, promised: bool = True) -> None:
        """Forgotten."""

    def weight_of(self, tenant: Tenant) -> float:
        """As configured."""
        return tenant.weight
