"""What the gateway keeps about its tenants: what they may use, what they used, how they fared."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from gateway.http_call import Header
from gateway.ledger.row import Ledger, NoLedger
from gateway.limits.limiter import Limiter
from gateway.settings import Settings
from gateway.slo.book import NoSloBook, SloBook
from gateway.tenants import Caller
from policies.limits import Demand
from policies.pricing import FREE, Price


@dataclass(slots=True)
class Tenancy:
    """Filled while the gateway starts, and used from when it is ready. Belongs to the event loop.

    Until the database and Redis are open, limits are this process's own and nothing is written
    down.
    """

    limiter: Limiter
    ledger: Ledger
    slo: SloBook


def local_tenancy() -> Tenancy:
    """In this process's memory: nothing is written down."""
    return Tenancy(_Unlimited(), NoLedger(), NoSloBook())


class Prices:
    """What each model costs, by its own name, as the settings in use have it."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._prices: dict[str, Price] = {}

    def of(self, settings: Settings, model: str) -> Price:
        """A model that nothing is said of is free."""
        if settings is not self._settings:
            self._settings = settings
            self._prices = {each.name: each.price.as_price() for each in settings.models}
        return self._prices.get(model, FREE)


class _Unlimited:
    """Lets everything in."""

    async def reserve(self, caller: Caller, model: str, demand: Demand) -> _Nothing:  # noqa: ARG002
        return _Nothing()

    def headers(self, caller: Caller) -> list[Header]:  # noqa: ARG002 - all alike
        return []


class _Nothing:
    """What was set aside of nothing."""

    @property
    def headers(self) -> list[Header]:
        return []

    def settle(self, tokens: int, cost_nusd: int) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass
