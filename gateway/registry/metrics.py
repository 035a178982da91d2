"""What the registry and the audit trail tell Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class RegistryStats:
    """`stale_s` is how long ago the database last said what it holds; `not_in_use` counts tenants
    and keys of it that are left out, `audit_rows_lost` actions that only the log tells of."""

    stale_s: float = 0.0
    tenants: int = 0
    keys: int = 0
    not_in_use: int = 0
    audit_rows_lost: int = 0


class RegistryCollector(Collector):
    """Says zero until there is a registry to ask."""

    def __init__(self) -> None:
        self._read: Callable[[], RegistryStats] = RegistryStats

    def watch(self, read: Callable[[], RegistryStats]) -> None:
        """Ask this at every scrape, from any thread."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        stats = self._read()
        yield GaugeMetricFamily(
            "forebay_registry_stale_seconds",
            "How long ago the database last said which tenants and keys there are.",
            value=stats.stale_s,
        )
        yield GaugeMetricFamily(
            "forebay_registry_tenants", "Tenants made at run time.", value=stats.tenants
        )
        yield GaugeMetricFamily(
            "forebay_registry_keys",
            "Keys made at run time that are not revoked.",
            value=stats.keys,
        )
        yield GaugeMetricFamily(
            "forebay_registry_not_in_use",
            "Tenants and keys made at run time that do not fit the configuration.",
            value=stats.not_in_use,
        )
        yield CounterMetricFamily(
            "forebay_audit_rows_lost",
            "Actions of operators that could not be written into the audit trail.",
            value=stats.audit_rows_lost,
        )
