"""Which ceilings a request is under."""

from __future__ import annotations

from gateway.tenants import Caller
from policies.limit_standing import AccountId, Ceiling


def ceilings_of(caller: Caller, model: str | None) -> list[Ceiling]:
    """Those of the tenant, of the key, and of the model within the tenant, where there are any."""
    tenant = caller.tenant
    found = []
    if tenant.limits.any:
        found.append(Ceiling(AccountId(tenant.id), tenant.limits))
    if caller.key.limits.any:
        found.append(Ceiling(AccountId(tenant.id, "key", caller.key.id), caller.key.limits))
    if model is not None and tenant.model_limits:
        limits = tenant.model_limits.get(model)
        if limits is not None and limits.any:
            found.append(Ceiling(AccountId(tenant.id, "model", model), limits))
    return found
