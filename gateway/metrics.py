"""Prometheus metrics, prefix `forebay_`, in a registry of their own.

Label values come from the configuration and from fixed lists only; whatever else turns up is
counted under "other", so that no client can add a series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from cache.block import Tier
from cache.hashing import owner_tags
from cache.report import CacheStats
from engine.report import EngineStats, StepReport
from gateway.batches.metrics import BatchCollector
from gateway.cache_metrics import CacheCollector
from gateway.dispatch_metrics import DispatchMetrics
from gateway.fleet_metrics import FleetCollector
from gateway.ledger.metrics import LedgerCollector
from gateway.limits.metrics import LimitsCollector
from gateway.registry.metrics import RegistryCollector
from gateway.replica_metrics import ReplicaCollector
from gateway.slo_metrics import SloCollector
from gateway.utilization_metrics import UtilizationCollector
from gateway.version import __version__

# The client library would double every counter and histogram by the time it was made at.
disable_created_metrics()  # type: ignore[no-untyped-call] # the library's annotations lack it

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `Metrics.render` returns."""

OTHER = "other"
ENDPOINTS = frozenset(
    {
        "chat",
        "completions",
        "models",
        "tokenize",
        "detokenize",
        "caches",
        "files",
        "batches",
        "usage",
    }
)
OUTCOMES = frozenset(
    {"success", "cancelled", "error", "expired", "refused", "limited", "unavailable"}
)
"""`refused` is a 4xx of the client's making, `limited` the tenant's own limit (429), `unavailable`
our capacity (503), `error` our fault, `expired` the request's own deadline (504), `cancelled` a
client that left."""

ReloadResult = Literal["success", "failure"]

_TTFT_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1, 2, 4, 8, 15, 30, 60)
_TPOT_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_E2E_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
_STEP_S = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_STEP_SEQUENCES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
_LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
_LAG_WINDOW_S = 60.0


class Metrics:
    """All metrics of one gateway. Safe to call from any thread."""

    def __init__(self, models: Iterable[str], tenants: Iterable[str], secret: bytes) -> None:
        """`models` and `tenants` are the names that may become label values. `secret` is the
        server's: under it replicas know the tenants by tags."""
        self._models = frozenset(models)
        self._tenants: frozenset[str] = frozenset()
        self._tenant_of_tag: dict[bytes, str] = {}
        self._secret = secret
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests_of: dict[tuple[str, str, str, str], Counter] = {}
        self._series_of: dict[tuple[str, str], _TenantModelSeries] = {}
        self._steps_of: dict[str, _StepSeries] = {}
        self._in_flight_of: dict[str, Gauge] = {}

        by_both = ("tenant", "model")
        self._requests = self._counter(
            "requests", "Requests answered.", (*by_both, "endpoint", "outcome")
        )
        self._ttft = self._histogram(
            "ttft_seconds", "From the request to its first token.", by_both, _TTFT_S
        )
        self._tpot = self._histogram(
            "tpot_seconds", "Between two tokens of one answer, on average.", by_both, _TPOT_S
        )
        self._e2e = self._histogram(
            "e2e_seconds", "From the request to the last byte of its answer.", by_both, _E2E_S
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, cached ones too.", by_both)
        self._cached = self._counter(
            "cached_tokens", "Prompt tokens taken from the cache.", by_both
        )
        self._cached_by_tier = self._counter(
            "cached_tokens_by_tier", "Prompt tokens taken from each tier.", (*by_both, "tier")
        )
        self._generated = self._counter("generated_tokens", "Tokens generated.", by_both)
        self._in_flight = Gauge(
            "forebay_in_flight",
            "Requests taken and not yet answered to the end.",
            ("tenant",),
            registry=self._registry,
        )
        self._named_cache_store_failures = self._counter(
            "named_cache_store_failures",
            "Times that Redis did not keep or find named prefixes.",
            (),
        )
        self._unknown_fields = self._counter(
            "unknown_fields", "Request fields that forebay does not know.", ()
        )
        self._step_seconds = self._histogram(
            "step_seconds", "One engine step.", ("replica",), _STEP_S
        )
        self._step_tokens = self._histogram(
            "step_tokens", "Tokens computed in one engine step.", ("replica",), _STEP_TOKENS
        )
        self._step_sequences = self._histogram(
            "step_sequences", "Sequences in one engine step.", ("replica",), _STEP_SEQUENCES
        )
        self._lag = self._histogram(
            "event_loop_lag_seconds", "How late the event loop ran a timer.", (), _LAG_S
        )
        self._lag_max = _WindowedMax(_LAG_WINDOW_S)
        self._counter_of_reloads = self._counter(
            "config_reloads", "Configuration reloads.", ("result",)
        )
        self._last_reload = Gauge(
            "forebay_config_last_success_timestamp",
            "When a configuration was last put to use, in seconds since the epoch.",
            registry=self._registry,
        )
        build = Gauge("forebay_build_info", "Always 1.", ("version",), registry=self._registry)
        build.labels(__version__).set(1)
        for result in ("success", "failure"):
            self._counter_of_reloads.labels(result)  # a counter that exists can be alerted on
        self.dispatch = DispatchMetrics(self._registry)
        self.fleet = FleetCollector()
        self.ledger = LedgerCollector()
        self.registry = RegistryCollector()
        self.limits = LimitsCollector()
        self.slo = SloCollector()
        self.batches = BatchCollector()
        parts: tuple[Collector, ...] = (self.ledger, self.limits, self.registry, self.slo)
        for collector in (self.fleet, *parts, self.batches):
            self._registry.register(collector)
        self._replicas = ReplicaCollector()
        self._registry.register(self._replicas)
        self.utilization = UtilizationCollector()
        self._registry.register(self.utilization)
        self._caches = CacheCollector(self._tenant_of_tag)
        self._registry.register(self._caches)
        lag_max = Gauge(
            "forebay_event_loop_lag_max_seconds",
            "The longest event-loop lag of the last one to two minutes.",
            registry=self._registry,
        )
        lag_max.set_function(self._lag_max.current)
        self.set_tenants(tenants)
        for tenant in self._tenants:
            self._in_flight_child(tenant)

    def set_tenants(self, tenants: Iterable[str]) -> None:
        """All that there are now, old and new. Who is gone has no series any more, or they would
        become ever more where tenants come and go; what still ends of theirs counts as "other"."""
        before, self._tenants = self._tenants, frozenset(tenants)
        gone = before - self._tenants
        for tenant in self._tenants - before:
            self._tenant_of_tag[owner_tags(self._secret, tenant, None).tenant] = tenant
        for tenant in gone:
            self._tenant_of_tag.pop(owner_tags(self._secret, tenant, None).tenant, None)
        self.slo.show(self._tenants)
        self._forget_tenants(gone - {OTHER})  # under that name everybody else is counted as well

    def request_finished(
        self,
        *,
        tenant: str | None,
        model: str | None,
        endpoint: str,
        outcome: str,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        e2e_s: float | None = None,
        prompt_tokens: int = 0,
        cached_by_tier: Mapping[Tier, int] = MappingProxyType({}),
        generated_tokens: int = 0,
    ) -> None:
        """One request is over, however it ended. Times that never came to be are None."""
        tenant, model = self._known_tenant(tenant), self._known_model(model)
        endpoint = endpoint if endpoint in ENDPOINTS else OTHER
        outcome = outcome if outcome in OUTCOMES else OTHER
        key = (tenant, model, endpoint, outcome)
        requests = self._requests_of.get(key)
        if requests is None:
            requests = self._requests_of[key] = self._requests.labels(*key)
        requests.inc()
        series = self._series_of.get((tenant, model))
        if series is None:
            series = self._series_of[tenant, model] = _TenantModelSeries(self, tenant, model)
        if ttft_s is not None:
            series.ttft.observe(ttft_s)
        if tpot_s is not None:
            series.tpot.observe(tpot_s)
        if e2e_s is not None:
            series.e2e.observe(e2e_s)
        series.prompt.inc(prompt_tokens)
        for tier, tokens in cached_by_tier.items():
            if tokens:
                series.cached.inc(tokens)
                series.cached_from[tier].inc(tokens)
        series.generated.inc(generated_tokens)

    def in_flight(self, tenant: str) -> InFlight:
        """A scope, as long as which one request of the tenant counts."""
        return InFlight(self._in_flight_child(self._known_tenant(tenant)))

    def named_cache_store_failed(self) -> None:
        """Redis did not answer about a named prefix; memory did."""
        self._named_cache_store_failures.inc()

    def unknown_field(self) -> None:
        """A request had a field that forebay does not know. Its name is no label."""
        self._unknown_fields.inc()

    def watch_replica(self, replica: str, model: str, stats: Callable[[], EngineStats]) -> None:
        """Report this replica's queue, pages and counters, asked for at every scrape."""
        self._replicas.watch(replica, model, stats)

    def watch_cache(self, replica: str, model: str, stats: Callable[[], CacheStats]) -> None:
        """Report this replica's cache tiers, asked for at every scrape."""
        self._caches.watch(replica, model, stats)

    def forget_replica(self, replica: str) -> None:
        """It is there no longer."""
        self._replicas.forget(replica)
        self._caches.forget(replica)
        self.utilization.forget(replica)
        if self._steps_of.pop(replica, None) is not None:
            for metric in (self._step_seconds, self._step_tokens, self._step_sequences):
                metric.remove(replica)

    def observe_step(self, replica: str, report: StepReport) -> None:
        """One engine step of a replica that the configuration names."""
        if report.sequences == 0:
            return
        series = self._steps_of.get(replica)
        if series is None:
            series = self._steps_of[replica] = _StepSeries(self, replica)
        series.seconds.observe(report.seconds)
        series.tokens.observe(report.tokens)
        series.sequences.observe(report.sequences)
        self.utilization.observe(replica, report)

    def observe_loop_lag(self, lag_s: float) -> None:
        """A timer of the event loop ran this much too late."""
        self._lag.observe(lag_s)
        self._lag_max.observe(lag_s)

    def config_loaded(self, result: ReloadResult, *, reload: bool) -> None:
        """A configuration was put to use or refused; the first load is no reload."""
        if reload:
            self._counter_of_reloads.labels(result).inc()
        if result == "success":
            self._last_reload.set_to_current_time()

    def render(self) -> bytes:
        """Everything in Prometheus' text format; see CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _known_tenant(self, tenant: str | None) -> str:
        return tenant if tenant in self._tenants else OTHER

    def _known_model(self, model: str | None) -> str:
        return model if model in self._models else OTHER

    def _forget_tenants(self, gone: frozenset[str]) -> None:
        for key in [key for key in self._requests_of if key[0] in gone]:
            del self._requests_of[key]
            self._requests.remove(*key)
        for both in [both for both in self._series_of if both[0] in gone]:
            del self._series_of[both]
            for metric in (self._ttft, self._tpot, self._e2e):
                metric.remove(*both)
            for counter in (self._prompt, self._cached, self._generated):
                counter.remove(*both)
            for tier in Tier:
                self._cached_by_tier.remove(*both, tier)
        for tenant in gone & self._in_flight_of.keys():
            del self._in_flight_of[tenant]
            self._in_flight.remove(tenant)

    def _in_flight_child(self, tenant: str) -> Gauge:
        gauge = self._in_flight_of.get(tenant)
        if gauge is None:
            gauge = self._in_flight_of[tenant] = self._in_flight.labels(tenant)
        return gauge

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"forebay_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(f"forebay_{name}", text, labels, buckets=buckets, registry=self._registry)


class InFlight:
    """One request's part of a gauge, for as long as its scope lasts."""

    __slots__ = ("_gauge",)

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge

    def __enter__(self) -> None:
        self._gauge.inc()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._gauge.dec()


class _TenantModelSeries:
    """The children of one tenant and model, bound once: looking them up costs more than using
    them."""

    __slots__ = ("cached", "cached_from", "e2e", "generated", "prompt", "tpot", "ttft")

    def __init__(self, metrics: Metrics, tenant: str, model: str) -> None:
        self.ttft = metrics._ttft.labels(tenant, model)
        self.tpot = metrics._tpot.labels(tenant, model)
        self.e2e = metrics._e2e.labels(tenant, model)
        self.prompt = metrics._prompt.labels(tenant, model)
        self.cached = metrics._cached.labels(tenant, model)
        self.cached_from = {
            tier: metrics._cached_by_tier.labels(tenant, model, tier) for tier in Tier
        }
        self.generated = metrics._generated.labels(tenant, model)


class _StepSeries:
    """The children of one replica, bound once."""

    __slots__ = ("seconds", "sequences", "tokens")

    def __init__(self, metrics: Metrics, replica: str) -> None:
        self.seconds = metrics._step_seconds.labels(replica)
        self.tokens = metrics._step_tokens.labels(replica)
        self.sequences = metrics._step_sequences.labels(replica)


class _WindowedMax:
    """The largest value of the current and the previous window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._started = time.monotonic()
        self._previous = 0.0
        self._now = 0.0

    def observe(self, value: float) -> None:
        self._turn()
        self._now = max(self._now, value)

    def current(self) -> float:
        self._turn()
        return max(self._now, self._previous)

    def _turn(self) -> None:
        age = time.monotonic() - self._started
        if age >= self._window_s:
            self._previous = self._now if age < 2 * self._window_s else 0.0
            self._now = 0.0
            self._started += age - age % self._window_s
