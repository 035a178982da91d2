"""Tenants and keys as the database keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gateway.settings_tenants import LimitSettings, TenantSettings

KeyState = Literal["active", "expired", "revoked"]


@dataclass(frozen=True, slots=True)
class RuntimeTenant:
    """A tenant made at run time. Times are Unix seconds."""

    settings: TenantSettings
    created_s: float
    updated_s: float

    @property
    def id(self) -> str:
        """The tenant's id."""
        return self.settings.id


@dataclass(frozen=True, slots=True)
class RuntimeKey:
    """A key made at run time, of a tenant from either place. `hashed` is all that is kept of the
    key itself. `replaced_by` is the id of the key that took its place. Times are Unix seconds."""

    id: str
    tenant: str
    hashed: str = field(repr=False)
    name: str
    limits: LimitSettings
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    replaced_by: str | None = None

    def state(self, now_s: float) -> KeyState:
        """Whether it lets anybody in."""
        if self.revoked_s is not None:
            return "revoked"
        if self.expires_s is not None and self.expires_s <= now_s:
            return "expired"
        return "active"


@dataclass(frozen=True, slots=True)
class Overlay:
    """What the database says at one moment: tenants in the order in which they were made, keys
    that are not revoked. `unreadable` are tenants and keys whose settings this version cannot use,
    by id, and why. `version` counts changes."""

    version: int = 0
    tenants: tuple[RuntimeTenant, ...] = ()
    keys: tuple[RuntimeKey, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether the file is all there is."""
        return not (self.tenants or self.keys or self.unreadable)
