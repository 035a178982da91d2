"""Callers, ledgers and limiters for tests. Windows are short where a test waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from gateway.errors import ApiError
from gateway.limits.limiter import Reservation
from gateway.limits.local import LocalLimiter
from gateway.limits.opening import open_limiter
from gateway.limits.shared import SharedLimiter
from gateway.tenants import Caller, KeyFacts, Tenant
from policies.limit_window import WindowShape
from policies.limits import NO_LIMITS, Demand, Limits
from tests.cache.relay import Relay, relaying
from tests.cache.valkey import Valkey

ONE = Demand(1, 1)
SHORT = WindowShape(500_000, 10)
"""Half a second, counted to a twentieth."""


def caller(
    limits: Limits = NO_LIMITS,
    *,
    tenant: str = "acme",
    key: Limits = NO_LIMITS,
    model: Limits | None = None,
) -> Caller:
    """One of a tenant; `model` is for the model m."""
    model_limits = {} if model is None else {"m": model}
    return Caller(Tenant(tenant, limits=limits, model_limits=model_limits), KeyFacts("key-1", key))


class FakeLedger:
    """Says what it is told to, and counts how often it is asked."""

    def __init__(self, nusd: int = 0) -> None:
        self.nusd = nusd
        self.asked: list[tuple[str, str | None, str | None, float]] = []
        self.broken = False
        self.was_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def spent(self, tenant: str, key: str | None, model: str | None, since_s: float) -> int:
        self.asked.append((tenant, key, model, since_s))
        self.was_asked.set()
        await self.may_answer.wait()
        if self.broken:
            raise OSError("user:password@host")
        return self.nusd


@asynccontextmanager
async def shared(
    url: str,
    spent: Callable[[str, str | None, str | None, float], Awaitable[int]] | None = None,
    *,
    gateways: int | Callable[[], int] = 2,
    shape: WindowShape | None = None,
    lease_s: float = 30.0,
    timeout_s: float = 2.0,
    cluster: bool = False,
) -> AsyncIterator[SharedLimiter]:
    """A limiter as each of several gateways has one. Patient, as the machine may be busy."""
    async with open_limiter(
        url,
        spent=spent or FakeLedger().spent,
        gateways=gateways if callable(gateways) else lambda: gateways,
        timeout_s=timeout_s,
        shape=shape,
        lease_s=lease_s,
        cluster=cluster,
    ) as limiter:
        assert isinstance(limiter, SharedLimiter)
        yield limiter


@contextmanager
def relayed(server: Valkey) -> Iterator[Relay]:
    """A way to the server of its own, which ends when nobody goes it any more."""
    with relaying(server.socket_path) as relay, server.client() as client:
        yield relay
        deadline_s, quiet = time.monotonic() + 5, 0
        while quiet < 3:  # a connection that is refused may still be on its way there
            assert time.monotonic() < deadline_s
            quiet = quiet + 1 if client.info("clients")["connected_clients"] == 1 else 0
            time.sleep(0.005)


async def let_in(
    limiter: LocalLimiter | SharedLimiter, who: Caller, demand: Demand = ONE
) -> Reservation | None:
    """What is reserved for a request of the model m; None if it is refused."""
    try:
        return await limiter.reserve(who, "m", demand)
    except ApiError as refused:
        if refused.status != 429:
            raise
        return None


async def run(
    limiter: LocalLimiter | SharedLimiter,
    who: Caller,
    demand: Demand = ONE,
    *,
    tokens: int = 1,
    cost_nusd: int = 0,
) -> bool:
    """One whole request; False if it is refused."""
    reservation = await let_in(limiter, who, demand)
    if reservation is None:
        return False
    with reservation:
        reservation.settle(tokens, cost_nusd)
    return True


async def refusal_of(
    limiter: LocalLimiter | SharedLimiter, who: Caller, demand: Demand = ONE
) -> ApiError:
    """The answer to a request that must be refused."""
    try:
        await limiter.reserve(who, "m", demand)
    except ApiError as refused:
        return refused
    raise AssertionError("the request was let in")


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait until the condition holds; fail if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - it may be about another process
            await asyncio.sleep(0.005)


async def told(*limiters: SharedLimiter) -> None:
    """Wait until Redis knows all that there is to know."""
    await until(lambda: not any(limiter.counts.journal for limiter in limiters))
