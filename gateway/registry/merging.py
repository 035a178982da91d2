"""The configuration file's tenants and keys with those made at run time laid over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.credentials import tenant_of
from gateway.registry.records import Overlay
from gateway.settings import Settings
from gateway.settings_cache import refuse_greedy_floors
from gateway.settings_tenants import TenantSettings
from gateway.tenants import KeyFacts, KeyRing, Tenant


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a tenant cannot be used beside the others: the `field` at fault, and half a sentence."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class Merged:
    """`settings` with all tenants, and everybody's keys.

    `problems` are what of the database is left out, by id, and why; `shadowed` the tenants made at
    run time of whose ids the file has tenants too.
    """

    settings: Settings
    key_ring: KeyRing
    problems: Mapping[str, str]
    shadowed: frozenset[str]


def merge(settings: Settings, key_ring: KeyRing, overlay: Overlay) -> Merged:
    """Lay what was made at run time over the file's own `settings` and `key_ring`.

    The file wins where both have a tenant of one id or the same key. A tenant that does not fit
    what the file says now is left out with its keys, rather than the file.
    """
    in_file = {tenant.id for tenant in settings.tenants}
    tenants = list(settings.tenants)
    problems = dict(overlay.unreadable)
    added: list[Tenant] = []
    for record in overlay.tenants:
        if record.id in in_file:
            continue
        misfit = misfit_of(record.settings, settings, tenants)
        if misfit is not None:
            problems[record.id] = f"{misfit.field}: {misfit.reason}"
            continue
        tenants.append(record.settings)
        added.append(tenant_of(record.settings))
    known = {**key_ring.tenants, **{tenant.id: tenant for tenant in added}}
    keys: list[tuple[str, Tenant, KeyFacts]] = []
    for key in overlay.keys:
        if (owner := known.get(key.tenant)) is None:
            problems[key.id] = "its tenant is not there"
        elif key_ring.has(key.hashed):
            problems[key.id] = "the configuration file has the same key"
        else:
            facts = KeyFacts(key.id, key.limits.as_limits(), key.expires_s)
            keys.append((key.hashed, owner, facts))
    if added:
        settings = settings.model_copy(update={"tenants": tuple(tenants)})
    return Merged(
        settings,
        key_ring.joined(keys, added),
        problems,
        frozenset(record.id for record in overlay.tenants) & in_file,
    )


def misfit_of(
    tenant: TenantSettings, settings: Settings, others: Sequence[TenantSettings]
) -> Misfit | None:
    """Why `tenant` cannot be used with these models beside these others, None if it can: what the
    file's validation says of all tenants together."""
    if (field := tenant.strange_model([model.name for model in settings.models])) is not None:
        return Misfit(field, "is no model's own name")
    if tenant.cache.device_floor or tenant.cache.dram_floor:
        caches = [model.cache for model in settings.models]
        try:
            refuse_greedy_floors(caches, [*(other.cache for other in others), tenant.cache])
        except ValueError as error:
            return Misfit("cache", str(error))
    return None
