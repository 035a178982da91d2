"""A forebay with several tenants on the bundled model.

Redis and the lower tiers are off, and no two prompts are alike: what is measured is who runs when,
and not what a cache remembers.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from loadtest.bench.campaign import warm_up
from loadtest.forebay_server import MODEL, running_forebay
from loadtest.target import Target
from policies.slo import Slo

_MAX_QUEUE_S = 600
_MAX_WAITING = 1024
"""Room and time for everything that is sent at once: who waits is what is measured."""


@dataclass(frozen=True, slots=True)
class BenchTenant:
    """A tenant of the configuration; `slo` None: it was promised nothing."""

    id: str
    service_class: str = "standard"
    weight: float = 1.0
    slo: Slo | None = None

    @property
    def key_variable(self) -> str:
        """The environment variable that holds its key."""
        return f"FOREBAY_LOADTEST_KEY_{self.id.upper()}"


def tenants_config(tenants: Sequence[BenchTenant], *, max_queue_s: float = _MAX_QUEUE_S) -> str:
    """The configuration of a gateway that runs the bundled model for them."""
    return (
        "models:\n"
        f"  - name: {MODEL}\n"
        "    path: bundled\n"
        f"    max_waiting: {_MAX_WAITING}\n"
        f"    max_queue_s: {max_queue_s:g}\n"
        "    cache: {dram: 0, redis: false}\n"
        "redis: {url: 'off'}\n"
        "tenants:\n" + "".join(map(_tenant_lines, tenants))
    )


def slo_line(slo: Slo) -> str:
    """What was promised, as the configuration says it. Only targets and their share are used."""
    targets = {"ttft_ms": slo.ttft_s, "tpot_ms": slo.tpot_s}
    said = [f"{name}: {value * 1e3:g}" for name, value in targets.items() if value is not None]
    return f"{{{', '.join([*said, f'target: {slo.target:g}'])}}}"


@asynccontextmanager
async def running_tenants(
    tenants: Sequence[BenchTenant], seed: int, *, max_queue_s: float = _MAX_QUEUE_S
) -> AsyncIterator[Mapping[str, Target]]:
    """The server, warmed up; each tenant's way in, by its id. Raises CampaignError."""
    keys = {tenant.key_variable: secrets.token_urlsafe(32) for tenant in tenants}
    config = tenants_config(tenants, max_queue_s=max_queue_s)
    async with running_forebay(keys, config=config) as server:
        targets = {
            tenant.id: Target(
                tenant.id, replace(server.endpoint, key=keys[tenant.key_variable]), MODEL
            )
            for tenant in tenants
        }
        await warm_up(targets[tenants[-1].id], seed)
        yield targets


def _tenant_lines(tenant: BenchTenant) -> str:
    promised = "" if tenant.slo is None else f"    slo: {slo_line(tenant.slo)}\n"
    return (
        f"  - id: {tenant.id}\n"
        f"    keys: [{{env: {tenant.key_variable}}}]\n"
        f"    class: {tenant.service_class}\n"
        f"    weight: {tenant.weight:g}\n"
        f"{promised}"
    )
