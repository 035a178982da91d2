"""On what terms a request runs: whose it is in the queues, how urgent, and until when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic

from cache.hashing import owner_tags
from gateway.errors import bad_request
from gateway.http_call import HttpCall
from gateway.peer import PeerTenant
from gateway.tenants import Tenant
from policies.service_class import SERVICE_TIERS, ServiceClass, class_of_tier, tier_of_class

TIMEOUT = "x-request-timeout-ms"
_LONGEST_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Terms:
    """`flow` names the tenant to queues, which it shares by `weight`. `timeout_at_s`
    (`time.monotonic`) is when its client will have no use for an answer any more. `due_at_s` is
    when its first token is due by what another forebay has promised: it orders queues here, and is
    no promise to be judged by. `tier` is the `service_tier` that the client asked for."""

    service_class: ServiceClass = ServiceClass.STANDARD
    flow: bytes = b""
    weight: float = 1.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    timeout_at_s: float | None = None
    tier: str | None = None
    started_s: float = 0.0
    due_at_s: float | None = None

    @property
    def priority(self) -> int:
        """Of its class; lower is more urgent."""
        return self.service_class.priority

    @property
    def deadline_s(self) -> float | None:
        """When its first token is due (`time.monotonic`)."""
        dues = [] if self.ttft_s is None else [self.started_s + self.ttft_s]
        if self.due_at_s is not None:
            dues.append(self.due_at_s)
        if self.timeout_at_s is not None:
            dues.append(self.timeout_at_s)
        return min(dues, default=None)

    @property
    def due_s(self) -> float | None:
        """In how many seconds it is due; negative if it should be there already."""
        due_s = self.deadline_s
        return None if due_s is None else due_s - monotonic()

    @property
    def served_tier(self) -> str | None:
        """The `service_tier` that the answer names; None if the client did not ask for one."""
        return None if self.tier is None else tier_of_class(self.service_class)

    def as_batch(self) -> Terms:
        """The same, run in the gaps that others leave."""
        return replace(self, service_class=ServiceClass.BATCH, ttft_s=None, tpot_s=None)

    def as_peers(self, peer: PeerTenant, flow: bytes) -> Terms:
        """The same for a tenant of a trusted peer's, which is the `flow`: the peer has decided how
        urgent it is, let it in by what was promised, and counts whether that was kept."""
        if peer.service_class is None:
            return replace(self, flow=flow)
        return replace(
            self,
            service_class=peer.service_class,
            flow=flow,
            weight=peer.weight,
            ttft_s=None,
            tpot_s=peer.tpot_s,
            due_at_s=None if peer.due_s is None else monotonic() + peer.due_s,
        )


def read_terms(
    call: HttpCall, tier: object, tenant: Tenant, *, flow: bytes, weight: float
) -> Terms:
    """From the call's headers, its body's `service_tier`, and what the tenant was promised.

    Raises a 400 ApiError for a tier or a timeout that is none.
    """
    if tier is not None and tier not in SERVICE_TIERS:
        raise bad_request(
            f"service_tier must be one of {', '.join(SERVICE_TIERS)}.", param="service_tier"
        )
    wanted = tier if isinstance(tier, str) else None
    service_class = class_of_tier(wanted, tenant.service_class)
    # what was promised was promised for the tenant's own class
    promised = service_class is tenant.service_class
    return Terms(
        service_class=service_class,
        flow=flow,
        weight=weight,
        ttft_s=tenant.slo.ttft_s if promised else None,
        tpot_s=tenant.slo.tpot_s if promised else None,
        timeout_at_s=_timeout_at_s(call),
        tier=wanted,
        started_s=call.started_s,
    )


def _timeout_at_s(call: HttpCall) -> float | None:
    value = call.header(TIMEOUT)
    if value is None:
        return None
    # one digit more than the longest has: int() of a very long text raises
    milliseconds = int(value[:9]) if value.isascii() and value.isdigit() else 0
    if not 1 <= milliseconds <= _LONGEST_MS or len(value) > 9:
        raise bad_request(
            f"The header {TIMEOUT} must be a whole number of milliseconds from 1 to {_LONGEST_MS}."
        )
    return call.started_s + milliseconds / 1e3


def seconds_left(terms: Terms) -> float | None:
    """Until the client gives up; None: it does not."""
    return None if terms.timeout_at_s is None else terms.timeout_at_s - monotonic()


class Flows:
    """What tenants are called in queues: tags under the server's secret, as for their KV."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._flows: dict[str, bytes] = {}

    def of(self, tenant_id: str) -> bytes:
        """The tenant's flow."""
        flow = self._flows.get(tenant_id)
        if flow is None:
            flow = self._flows[tenant_id] = owner_tags(self._secret, tenant_id, None).tenant
        return flow
