"""Tenants and keys as JSON values. Of a key there is never more than its id."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from gateway.registry.records import RuntimeKey
from gateway.settings_tenants import TenantSettings
from gateway.tenants import Caller
from policies.limits import Limits
from policies.pricing import NUSD


def tenant_answer(
    settings: TenantSettings,
    source: str,
    *,
    keys: int,
    created_s: float | None = None,
    updated_s: float | None = None,
    problem: str | None = None,
) -> dict[str, Any]:
    """A tenant with all of its settings, defaults too, as the configuration would have them; how
    many keys of it let somebody in; Unix seconds, null for the file's; why it is not in use."""
    return {
        **settings.model_dump(mode="json", by_alias=True, exclude={"keys"}),
        "source": source,
        "keys": keys,
        "created_at": _time(created_s),
        "updated_at": _time(updated_s),
        "problem": problem,
    }


def key_answer(key: RuntimeKey, now_s: float, problem: str | None) -> dict[str, Any]:
    """A key that was made at run time. Times are Unix seconds."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "source": "runtime",
        "state": key.state(now_s),
        "limits": _limits(key.limits.as_limits()),
        "created_at": _time(key.created_s),
        "expires_at": _time(key.expires_s),
        "revoked_at": _time(key.revoked_s),
        "replaced_by": key.replaced_by,
        "problem": problem,
    }


def file_key_answer(caller: Caller) -> dict[str, Any]:
    """A key of the configuration file."""
    return {
        "id": caller.key.id,
        "tenant": caller.tenant.id,
        "name": "",
        "source": "file",
        "state": "active",
        "limits": _limits(caller.key.limits),
        "created_at": None,
        "expires_at": _time(caller.key.expires_s),
        "revoked_at": None,
        "replaced_by": None,
        "problem": None,
    }


def _limits(limits: Limits) -> dict[str, Any]:
    """Those that are set."""
    budget = limits.budget_nusd
    ceilings = {
        "rpm": limits.rpm,
        "tpm": limits.tpm,
        "concurrency": limits.concurrency,
        "budget_usd": None
        if budget is None
        else {"amount": str(Decimal(budget) / NUSD), "per": limits.budget_per},
    }
    return {name: ceiling for name, ceiling in ceilings.items() if ceiling is not None}


def _time(moment_s: float | None) -> int | None:
    return None if moment_s is None else int(moment_s)
