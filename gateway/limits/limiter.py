"""The seam: who says whether a request is within its limits."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from gateway.http_call import Header
from gateway.tenants import Caller
from policies.limits import Demand


class Reservation(Protocol):
    """What was set aside for one request. A scope: leaving it without `settle` gives all of it
    back, as if the request had never come. The place among the tenant's concurrent requests is held
    until the scope ends in either case."""

    @property
    def headers(self) -> list[Header]:
        """`x-ratelimit-*` as they stand with this request counted; empty without limits."""
        ...

    def settle(self, tokens: int, cost_nusd: int) -> None:
        """What was used, weighted as the demand was. Never blocks or raises. The first call
        counts."""
        ...

    def __enter__(self) -> Reservation: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Limiter(Protocol):
    """Belongs to the event loop."""

    async def reserve(self, caller: Caller, model: str, demand: Demand) -> Reservation:
        """Set aside what the request may use, of everything that limits it or of nothing.

        Raises a 429 ApiError with a true `Retry-After` and the `x-ratelimit-*` headers for the
        tenant's own limit; a refused request spends nothing.
        """
        ...

    def headers(self, caller: Caller) -> list[Header]:
        """The `x-ratelimit-*` headers as last known here, for answers of requests that reserved
        nothing."""
        ...
