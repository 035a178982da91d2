"""What Prometheus is told of the registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.registry.metrics import RegistryCollector, RegistryStats


def test_zero_until_there_is_one_and_then_what_it_says() -> None:
    collector, registry = RegistryCollector(), CollectorRegistry()
    registry.register(collector)
    assert registry.get_sample_value("forebay_registry_stale_seconds") == 0
    collector.watch(lambda: RegistryStats(1.5, 2, 3, 4, 5))
    names = ("registry_stale_seconds", "registry_tenants", "registry_keys", "registry_not_in_use")
    values = [registry.get_sample_value(f"forebay_{name}") for name in names]
    assert values == [1.5, 2, 3, 4]
    assert registry.get_sample_value("forebay_audit_rows_lost_total") == 5
