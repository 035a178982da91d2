"""What the gateway keeps about its tenants: who they are, what they may use, what they used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.batches.line_runner import LineRunner
from gateway.batches.opening import LateBatches
from gateway.database.opening import LateDatabase
from gateway.ledger.book import LedgerBook
from gateway.ledger.row import Ledger, NoLedger
from gateway.limits.limiter import Limiter
from gateway.limits.local import LocalLimiter
from gateway.limits.seeds import Seeds
from gateway.metrics import Metrics
from gateway.registry.audit import AuditTrail
from gateway.registry.registry import Registry
from gateway.reload import RuntimeConfig
from gateway.settings import Settings
from gateway.slo.admission import Admission
from gateway.slo.book import SloBook
from gateway.slo.windowed_book import WindowedSloBook
from policies.pricing import FREE, Price

_MAX_QUEUE_S = 60.0


async def _nothing_to_follow() -> None:
    """There is no fleet that would have to know."""


async def _nothing_spent(*_: object) -> int:
    """There is no ledger to ask."""
    return 0


class Tenancy:
    """All of it for one gateway. Belongs to the event loop.

    Limits are this process's own, and nothing is written down, until `open`. `lines` runs the lines
    of batches, once there is an application.
    """

    def __init__(
        self,
        runtime: RuntimeConfig,
        metrics: Metrics,
        *,
        follow: Callable[[], Awaitable[object]] = _nothing_to_follow,
    ) -> None:
        """`follow` has the fleet do as tenants made at run time want it."""
        self.database = LateDatabase()
        self.trail = AuditTrail(self.database)
        self.registry = Registry(
            self.database, runtime, on_tenants=metrics.set_tenants, follow=follow
        )
        self.limiter: Limiter = LocalLimiter(Seeds(_nothing_spent))
        self.ledger: Ledger = NoLedger()
        self.book: LedgerBook | None = None
        book = WindowedSloBook()
        self.slo: SloBook = book
        self.admission = Admission()
        metrics.slo.watch(book, self.admission)
        self.model_terms = ModelTerms()
        self.batches = LateBatches()
        self.lines: LineRunner | None = None

    def open(self, limiter: Limiter, book: LedgerBook) -> None:
        """Redis and the database are there."""
        self.limiter = limiter
        self.ledger = self.book = book


class ModelTerms:
    """What the settings in use say of each model, by its own name: looked up for every request."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._terms: dict[str, tuple[Price, float]] = {}

    def price(self, settings: Settings, model: str) -> Price:
        """What it costs; a model that nothing is said of is free."""
        return self._of(settings, model)[0]

    def max_queue_s(self, settings: Settings, model: str) -> float:
        """The most work that may be in front of a request for it."""
        return self._of(settings, model)[1]

    def _of(self, settings: Settings, model: str) -> tuple[Price, float]:
        if settings is not self._settings:
            self._settings = settings
            self._terms = {
                each.name: (each.price.as_price(), each.max_queue_s) for each in settings.models
            }
        return self._terms.get(model, (FREE, _MAX_QUEUE_S))
