"""A book that judges and remembers nothing."""

from __future__ import annotations

from gateway.tenants import Tenant


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
    ) -> bool | None:
        """Judged, and forgotten."""
        if not promised or not tenant.slo.promises:
            return None
        return tenant.slo.met(ttft_s, tpot_s)

    def shed(self, tenant: Tenant, model: str, *, promised: bool = True) -> None:
        """Forgotten."""

    def weight_of(self, tenant: Tenant) -> float:
        """As configured."""
        return tenant.weight
