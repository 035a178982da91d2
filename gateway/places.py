"""How many requests a tenant may have in flight, and how many calls that are work by themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from types import TracebackType

from gateway.errors import limit_exceeded
from gateway.tenants import Tenant

_NEW_SHARE = 0.2  # of the newest request in the running mean
_LONGEST_WAIT_S = 60


@dataclass(slots=True)
class _Usage:
    in_flight: int = 0
    mean_s: float = 1.0


class ConcurrencyLimits:
    """Counts requests per tenant; a request with several choices or prompts counts once.

    Used from the event loop only. What a tenant may have is read from the tenant each time, so that
    a reload takes effect at the next request.
    """

    def __init__(self, on_refused: Callable[[], None]) -> None:
        """`on_refused` is called for every request that gets no slot."""
        self._on_refused = on_refused
        self._usage: dict[str, _Usage] = {}

    def in_flight(self, tenant: Tenant) -> int:
        """Slots the tenant holds now."""
        usage = self._usage.get(tenant.id)
        return usage.in_flight if usage is not None else 0

    def slot(self, tenant: Tenant) -> Slot:
        """One slot, held as long as its scope lasts.

        Entering raises a 429 ApiError when all are taken, which costs nothing. Its Retry-After is
        how long the tenant's own recent requests say that a slot takes to fall free.
        """
        usage = self._usage.get(tenant.id)
        if usage is None:
            usage = self._usage[tenant.id] = _Usage()
        return Slot(usage, tenant.limits.concurrency, self._on_refused)


class Slot:
    """A scope. A class, and no generator: every request enters one."""

    __slots__ = ("_limit", "_on_refused", "_started_s", "_usage")

    def __init__(self, usage: _Usage, limit: int | None, on_refused: Callable[[], None]) -> None:
        self._usage = usage
        self._limit = limit
        self._on_refused = on_refused
        self._started_s = 0.0

    def __enter__(self) -> None:
        usage, limit = self._usage, self._limit
        if limit is not None and usage.in_flight >= limit:
            wait_s = min(math.ceil(usage.mean_s / limit), _LONGEST_WAIT_S)
            self._on_refused()
            raise limit_exceeded(
                f"This key's tenant has its limit of {limit} requests in flight.",
                code="concurrency_limit_exceeded",
                retry_after_s=wait_s,
            )
        usage.in_flight += 1
        self._started_s = monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        usage = self._usage
        usage.in_flight -= 1
        usage.mean_s += _NEW_SHARE * (monotonic() - self._started_s - usage.mean_s)


class FewAtOnce:
    """Bounds what each tenant has under way of something that no limit of its own counts."""

    def __init__(self, most: int, *, of: str, retry_after_s: int) -> None:
        """`of` is what these are, as the refusal names them."""
        self._most = most
        self._of = of
        self._retry_after_s = retry_after_s
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant_id: str) -> Iterator[None]:
        """One of the tenant's places, for as long as the scope lasts; a 429 ApiError if all are
        taken."""
        under_way = self._under_way
        if under_way[tenant_id] >= self._most:
            raise limit_exceeded(
                f"This key's tenant has {self._most} {self._of} under way already.",
                code="concurrency_limit_exceeded",
                retry_after_s=self._retry_after_s,
            )
        under_way[tenant_id] += 1
        try:
            yield
        finally:
            under_way[tenant_id] -= 1
            if not under_way[tenant_id]:
                del under_way[tenant_id]
