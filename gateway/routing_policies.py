"""Routing policies by name: the built-in ones, and those of other installed distributions.

A distribution offers one by an entry point of the group `forebay.routing_policies`: its name is
what a configuration says, its value what makes a policy when called without arguments, such as a
class that implements `policies.routing.RoutingPolicy`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from policies.routing import RoutingPolicy
from policies.routing_policies import BUILT_IN

ENTRY_POINTS = "forebay.routing_policies"


class RoutingPolicyError(ValueError):
    """There is no such policy, or it could not be made."""


def policy_names() -> list[str]:
    """Every name that `load_policy` knows, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def load_policy(name: str) -> RoutingPolicy:
    """A new policy of this name; every model has its own. A built-in name is always the built-in.

    Raises RoutingPolicyError, which names what was found and what went wrong.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    offers = entry_points(group=ENTRY_POINTS, name=name)
    if not offers:
        known = ", ".join(policy_names())
        raise RoutingPolicyError(f"{name!r} is no routing policy; there are {known}")
    if len(offers) > 1:
        origins = " and ".join(sorted(_origin(offer) for offer in offers))
        raise RoutingPolicyError(f"routing policy {name!r} is offered by {origins}; keep one")
    (offer,) = offers
    try:
        policy = offer.load()()
    except Exception as error:
        raise RoutingPolicyError(
            f"routing policy {name!r} of {_origin(offer)} cannot be made: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(policy, "choose", None)):
        raise RoutingPolicyError(
            f"routing policy {name!r} of {_origin(offer)} has no method `choose`"
        )
    made: RoutingPolicy = policy
    return made


def _origin(offer: EntryPoint) -> str:
    return f"{offer.dist.name} {offer.dist.version}" if offer.dist is not None else offer.value
