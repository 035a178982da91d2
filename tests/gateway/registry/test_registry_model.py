"""Whatever is done in whatever order by whichever gateway: all of them let in who should be."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.registry.registry import NewKey, tenant_not_found
from tests.gateway.database.both import Place
from tests.gateway.registry.gateways import FILE_KEY, Gateway, deed, tenant, two_gateways

TENANTS = ("acme", "beta", "gamma")  # the first is the file's

Verb = Literal["create", "delete", "issue", "rotate", "revoke", "expire", "revive"]


@dataclass(frozen=True)
class Step:
    """Something that an operator does at one of two gateways."""

    at: int
    verb: Verb
    tenant: str
    key: int


@dataclass
class Known:
    """A key, and whether it should let somebody in."""

    made: NewKey
    tenant: str
    good: bool = True
    revoked: bool = False
    replaced: bool = False


@dataclass
class Model:
    """What should be."""

    tenants: set[str] = field(default_factory=lambda: {"acme"})
    keys: list[Known] = field(default_factory=list)

    def key(self, step: Step) -> Known | None:
        """Which one a step is about; None while there is none."""
        return self.keys[step.key % len(self.keys)] if self.keys else None


steps = st.lists(
    st.builds(
        Step,
        at=st.integers(0, 1),
        verb=st.sampled_from(
            ["create", "delete", "issue", "issue", "rotate", "revoke", "expire", "revive"]
        ),
        tenant=st.sampled_from(TENANTS),
        key=st.integers(0, 5),
    ),
    max_size=14,
)


@settings(max_examples=12, deadline=None)
@given(steps)
def test_all_gateways_let_in_who_should_be(taken: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as state:
        asyncio.run(play(Place("sqlite", {"FOREBAY_STATE_DIR": state}), taken))


async def play(place: Place, taken: list[Step]) -> None:
    model = Model()
    async with two_gateways(place) as gateways:
        for step in taken:
            gateway = gateways[step.at]
            expected = is_allowed(step, model)
            assert await is_done(gateway, step, model) == expected, step
            if expected:  # what is done is in use here at once, and so is all that was done before
                check(gateway, model)
        for gateway in gateways:
            await gateway.registry.refresh()
            check(gateway, model)


async def is_done(gateway: Gateway, step: Step, model: Model) -> bool:
    try:
        await take(gateway, step, model)
    except ApiError as refusal:
        if refusal.status not in (404, 409):
            raise
        return False
    return True


def check(gateway: Gateway, model: Model) -> None:
    """Exactly those are let in who should be, as whom they should be."""
    assert set(gateway.runtime.current.key_ring.tenants) == model.tenants
    assert gateway.who(FILE_KEY) == "acme"
    for key in model.keys:
        assert gateway.admits(key.made.plain) == key.good
        if key.good:
            assert gateway.who(key.made.plain) == key.tenant


def is_allowed(step: Step, model: Model) -> bool:
    if step.verb == "create":
        return step.tenant not in model.tenants
    if step.verb == "delete":
        return step.tenant in model.tenants - {"acme"}
    if step.verb == "issue":
        return step.tenant in model.tenants
    key = model.key(step)
    if step.verb == "revoke":
        return key is not None
    if key is None:
        return False
    if step.verb == "rotate":
        return key.good and not key.replaced
    if step.verb == "revive":
        return not key.revoked and not key.replaced
    return not key.revoked


async def take(gateway: Gateway, step: Step, model: Model) -> None:
    registry = gateway.registry
    key = model.key(step)
    if step.verb == "create":
        await registry.create_tenant(tenant(step.tenant), deed())
        model.tenants.add(step.tenant)
    elif step.verb == "delete":
        await registry.delete_tenant(step.tenant, deed(), unknown=False)
        model.tenants.discard(step.tenant)
        for each in model.keys:
            if each.tenant == step.tenant:
                each.good, each.revoked = False, True
    elif step.verb == "issue":
        made = await registry.create_key(step.tenant, deed())
        model.keys.append(Known(made, step.tenant))
    elif key is None:
        raise tenant_not_found()
    elif step.verb == "rotate":
        key_id = key.made.record.id
        made = await registry.rotate_key(key_id, deed(), grace_s=0, lifetime_s=None)
        model.keys.append(Known(made, key.tenant))
        key.good, key.replaced = False, True
    elif step.verb == "revoke":
        await registry.revoke_key(key.made.record.id, deed())
        key.good, key.revoked = False, True
    elif step.verb == "expire":
        await registry.change_key(key.made.record.id, deed(), expires=(1.0,))
        key.good = False
    else:
        await registry.change_key(key.made.record.id, deed(), expires=(None,))
        key.good = True
