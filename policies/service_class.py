"""The three classes of work, and which of them a request runs in."""

from __future__ import annotations

from enum import StrEnum


class ServiceClass(StrEnum):
    """`INTERACTIVE` runs before `STANDARD`, and that before `BATCH`."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def priority(self) -> int:
        """Its place in every queue: 0 is the most urgent."""
        return _PRIORITIES[self]


_PRIORITIES = {ServiceClass.INTERACTIVE: 0, ServiceClass.STANDARD: 1, ServiceClass.BATCH: 2}
_CLASS_OF_TIER = {
    "priority": ServiceClass.INTERACTIVE,
    "default": ServiceClass.STANDARD,
    "flex": ServiceClass.BATCH,
}
_TIER_OF_CLASS = {service_class: tier for tier, service_class in _CLASS_OF_TIER.items()}

SERVICE_TIERS = ("auto", "default", "flex", "priority")
"""What OpenAI's `service_tier` may be in a request."""


def class_of_tier(tier: str | None, own: ServiceClass) -> ServiceClass:
    """The class that a request of a tenant of class `own` runs in, by its `service_tier`.

    None and "auto" are the tenant's own class. A tier never lifts a request above that.
    """
    wanted = _CLASS_OF_TIER.get(tier or "auto", own)
    return max(wanted, own, key=lambda each: each.priority)


def tier_of_class(service_class: ServiceClass) -> str:
    """The `service_tier` by which an answer says what it ran as."""
    return _TIER_OF_CLASS[service_class]
