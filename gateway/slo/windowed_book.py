"""The account of promises over the last hour, and the weights that follow from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from gateway.slo.series import LONG_S, SHORT_S, Latencies, Series, Tally, covered_s
from gateway.tenants import Tenant
from policies.error_budget import Burn, burn_rate, class_excess, next_factor
from policies.service_class import ServiceClass
from policies.slo import LatestTimes

_MOST_SERIES = 2000
"""Of a tenant and a model; who was quiet for longest is forgotten beyond that."""
_WEIGH_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class SloReport:
    """One tenant's requests to one model: `hour` is the last one, `total` since the start. Of the
    last five minutes are `goodput_rps`, answers per second that kept what was promised, and
    `latencies`."""

    tenant: str
    model: str
    hour: Tally
    total: Tally
    goodput_rps: float
    latencies: Latencies


@dataclass(frozen=True, slots=True)
class BurnReport:
    """One tenant's error budget over all models: how fast it burns over five minutes and over an
    hour, who was refused for want of room counted as failed; and what the tenant weighs now."""

    tenant: str
    short: float
    long: float
    weight: float


class WindowedSloBook:
    """Implements `SloBook`, in this process's memory.

    Weights follow from answers alone, not from who was refused: a tenant that asks for more than
    its share is refused the more the more it asks for, and must not get a larger share for that.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._series: OrderedDict[tuple[str, str], Series] = OrderedDict()
        self._tenants: dict[str, Tenant] = {}
        self._factors: dict[str, float] = {}
        self._weighed_s = self._began_s

    def note(
        self,
        tenant: Tenant,
        model: str,
        *,
        promised: bool,
        ttft_s: float | None,
        tpot_s: float | None,
        publish_s: float | None,
        at_most: LatestTimes | None = None,
    ) -> bool | None:
        """See `SloBook.note`."""
        met = tenant.slo.judged(ttft_s, tpot_s, at_most) if promised else None
        tally = Tally(1, 0 if met is None else 1, 1 if met else 0)
        self._of(tenant, model).add(self._clock(), tally, ttft_s, tpot_s, publish_s)
        return met

    def shed(self, tenant: Tenant, model: str, *, promised: bool = True) -> None:
        """See `SloBook.shed`."""
        if promised and tenant.slo.promises:
            self._of(tenant, model).add(self._clock(), Tally(shed=1))

    def weight_of(self, tenant: Tenant) -> float:
        """See `SloBook.weight_of`."""
        now_s = self._clock()
        if now_s - self._weighed_s >= _WEIGH_EVERY_S:
            self._weighed_s = now_s
            self._weigh(now_s)
        return tenant.weight * self._factors.get(tenant.id, 1.0)

    def report(self, tenant: str, model: str) -> SloReport | None:
        """Of one series; None if it has had no requests. Any thread."""
        series = self._series.get((tenant, model))
        return None if series is None else self._report(tenant, model, series, self._clock())

    def reports(self) -> list[SloReport]:
        """Of every tenant and model that has had requests. Any thread."""
        now_s = self._clock()
        return [
            self._report(tenant, model, series, now_s)
            for (tenant, model), series in self._series.copy().items()
        ]

    def burns(self) -> list[BurnReport]:
        """Of every tenant to which something was promised. Any thread."""
        now_s = self._clock()
        tenants = self._tenants.copy()
        found = []
        for tenant_id, tallies in self._by_tenant(now_s).items():
            tenant = tenants.get(tenant_id)
            if tenant is None or not tenant.slo.promises:
                continue
            target = tenant.slo.target
            short, long = (burn_rate(t.met, t.promised + t.shed, target) for t in tallies)
            weight = tenant.weight * self._factors.get(tenant_id, 1.0)
            found.append(BurnReport(tenant_id, short, long, weight))
        return found

    def _of(self, tenant: Tenant, model: str) -> Series:
        self._tenants[tenant.id] = tenant
        key = tenant.id, model
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series()
            if len(self._series) > _MOST_SERIES:
                (forgotten, _), _ = self._series.popitem(last=False)
                if all(each != forgotten for each, _ in self._series):
                    self._tenants.pop(forgotten, None)
                    self._factors.pop(forgotten, None)
        self._series.move_to_end(key)
        return series

    def _weigh(self, now_s: float) -> None:
        burns: dict[ServiceClass, dict[str, Burn]] = {}
        for tenant_id, (short, long) in self._by_tenant(now_s).items():
            tenant = self._tenants[tenant_id]
            if tenant.slo.promises and long.promised:
                burns.setdefault(tenant.service_class, {})[tenant_id] = Burn(
                    burn_rate(short.met, short.promised, tenant.slo.target),
                    burn_rate(long.met, long.promised, tenant.slo.target),
                    short.promised,
                    long.promised,
                )
        factors: dict[str, float] = {}
        for of_class in burns.values():
            whole = class_excess(of_class.values())
            for tenant_id, own in of_class.items():
                factor = next_factor(self._factors.get(tenant_id, 1.0), own, whole)
                if factor != 1.0:
                    factors[tenant_id] = factor
        self._factors = factors

    def _by_tenant(self, now_s: float) -> dict[str, tuple[Tally, Tally]]:
        """The last five minutes and the last hour, over all models."""
        found: dict[str, tuple[Tally, Tally]] = {}
        for (tenant, _), series in self._series.copy().items():
            short, long = found.get(tenant, (Tally(), Tally()))
            found[tenant] = (
                short.plus(series.over(SHORT_S, now_s)),
                long.plus(series.over(LONG_S, now_s)),
            )
        return found

    def _report(self, tenant: str, model: str, series: Series, now_s: float) -> SloReport:
        lately = series.over(SHORT_S, now_s)
        return SloReport(
            tenant=tenant,
            model=model,
            hour=series.over(LONG_S, now_s),
            total=series.total,
            goodput_rps=lately.met / covered_s(SHORT_S, now_s, self._began_s),
            latencies=series.latencies(now_s),
        )
