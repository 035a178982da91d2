"""What dispatch tells Prometheus: decisions and how right they were, moves, warm-ups, replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.dispatch.member import Condition, Member, Routable
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.warmer import Outcome

_ERROR_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_DECISION_S = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3)

Members = Callable[[], Sequence[Member[Routable]]]


class DispatchMetrics:
    """Counts decisions. Models and replicas are the operator's own names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "forebay_route_decisions",
            "Requests sent to each replica.",
            ("model", "replica", "policy"),
            registry=registry,
        )
        self._error = Histogram(
            "forebay_route_prediction_error_seconds",
            "Between the predicted and the real time to first token, either way.",
            ("model",),
            buckets=_ERROR_S,
            registry=registry,
        )
        self._decision = Histogram(
            "forebay_route_decision_seconds",
            "Time that choosing a replica took.",
            ("model",),
            buckets=_DECISION_S,
            registry=registry,
        )
        self._promised = Counter(
            "forebay_route_promised_tokens",
            "Prompt tokens that the chosen replica was believed to have cached.",
            ("model",),
            registry=registry,
        )
        self._served = Counter(
            "forebay_route_served_tokens",
            "Of the prompts so counted, tokens that the replica really had.",
            ("model",),
            registry=registry,
        )
        self._failovers = Counter(
            "forebay_failovers",
            "Requests that were moved because their replica was lost.",
            ("model", "when"),
            registry=registry,
        )
        self._warm_ups = Counter(
            "forebay_prefix_warmups",
            "Hot prefixes that were to be loaded onto one more replica.",
            ("model", "outcome"),
            registry=registry,
        )
        self._decisions_of: dict[tuple[str, str, str], Counter] = {}
        self._series_of: dict[str, _ModelSeries] = {}
        self._members = _MembersCollector(self._forget_others)
        registry.register(self._members)

    def watch(self, model: str, members: Members) -> None:
        """Report these replicas' state at every scrape."""
        self._members.models[model] = members

    def decided(self, receipt: Receipt) -> None:
        """A request is being sent somewhere."""
        model = receipt.model
        key = (model, receipt.candidate.name, receipt.policy)
        decisions = self._decisions_of.get(key)
        if decisions is None:
            decisions = self._decisions_of[key] = self._decisions.labels(*key)
        decisions.inc()
        self._of(model).decision.observe(receipt.decision_s)
        if receipt.moved_from is not None:
            when = "mid_stream" if receipt.had_begun else "before_first_token"
            self._failovers.labels(model, when).inc()

    def began(self, receipt: Receipt) -> None:
        """Its first token has come."""
        series = self._of(receipt.model)
        if (error_s := receipt.error_s) is not None:
            series.error.observe(abs(error_s))
        if receipt.served_tokens is not None:
            series.promised.inc(receipt.candidate.cached.tokens)
            series.served.inc(receipt.served_tokens)

    def warmed_up(self, model: str, outcome: Outcome) -> None:
        """A warm-up is over."""
        self._warm_ups.labels(model, outcome).inc()

    def _forget_others(self, model: str, replicas: set[str]) -> None:
        """Drop the series of what is no replica of the model any more: servers elsewhere may come
        and go for ever, each by a name of its own."""
        for key in list(self._decisions_of):
            if key[0] == model and key[1] not in replicas:
                self._decisions_of.pop(key, None)
                self._decisions.remove(*key)

    def _of(self, model: str) -> _ModelSeries:
        series = self._series_of.get(model)
        if series is None:
            series = self._series_of[model] = _ModelSeries(self, model)
        return series


class _ModelSeries:
    """The children of one model, bound once: looking them up costs more than using them."""

    __slots__ = ("decision", "error", "promised", "served")

    def __init__(self, metrics: DispatchMetrics, model: str) -> None:
        self.decision = metrics._decision.labels(model)
        self.error = metrics._error.labels(model)
        self.promised = metrics._promised.labels(model)
        self.served = metrics._served.labels(model)


class _MembersCollector(Collector):
    def __init__(self, seen: Callable[[str, set[str]], None]) -> None:
        """`seen` is told the names of each model's replicas at every scrape."""
        self.models: dict[str, Members] = {}
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        """One reading of every replica."""
        labels = ("model", "replica", "kind")
        up = GaugeMetricFamily(
            "forebay_replica_up", "1 while a replica takes requests.", labels=labels
        )
        draining = GaugeMetricFamily(
            "forebay_replica_draining", "1 while a replica is being emptied.", labels=labels
        )
        breaker = GaugeMetricFamily(
            "forebay_replica_breaker_open",
            "1 while nothing is sent to a replica because it has lost requests.",
            labels=labels,
        )
        pending = GaugeMetricFamily(
            "forebay_replica_pending_tokens",
            "Prompt tokens that were sent to a replica and are not computed yet, as predicted.",
            labels=labels,
        )
        sequences = GaugeMetricFamily(
            "forebay_replica_sequences",
            "Sequences that this gateway has at a replica.",
            labels=labels,
        )
        for model, members in list(self.models.items()):
            present = members()
            self._seen(model, {member.name for member in present})
            for member in present:
                at = (model, member.name, member.kind)
                condition = member.health().condition
                up.add_metric(at, float(member.takes_requests()))
                draining.add_metric(at, float(condition is Condition.DRAINING))
                breaker.add_metric(at, float(not member.breaker.closed))
                pending.add_metric(at, member.load.own().pending_tokens)
                sequences.add_metric(at, member.load.sequences)
        yield from (up, draining, breaker, pending, sequences)
