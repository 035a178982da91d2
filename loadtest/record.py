"""What became of each request of a run, live or simulated: all figures and reports come from this.

Times are seconds from the run's beginning, on one clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from loadtest.plan import SOLE_TENANT, TenantPlan
from policies.slo import Slo


class Outcome(StrEnum):
    """How a request ended. `WRONG`: answered whole, but not as asked (length, counts, text)."""

    OK = "ok"
    LIMITED = "limited"  # 429: the tenant's own limit
    OVERLOADED = "overloaded"  # 503: the server's capacity
    REFUSED = "refused"  # any other status
    UNREACHABLE = "unreachable"
    TIMED_OUT = "timed out"
    BROKEN = "broken"  # begun and not ended: cut, an error event, no usage
    WRONG = "wrong"


class Tiers(NamedTuple):
    """Prompt tokens found in the cache, by the tier that had them."""

    device: int = 0
    dram: int = 0
    redis: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One request. `due_s` is when it was to be sent, `sent_s` when it was: what lies between is
    the client's fault and in no other figure. `first_s` is its first token, `publish_s` its first
    token that a reader sees (the same unless a model thinks first), `last_s` the last; None where
    there was none.

    `gaps_s` are the times between one piece of the answer and the next. `tiers` says where
    `cached_tokens` came from, if that is known. `price_nusd` is what the server charged, in
    billionths of a US dollar. `stall_s` is the longest that the client itself was busy with other
    things meanwhile. None: not known.
    """

    index: int
    due_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    publish_s: float | None = None
    cached_tokens: int | None = None
    tiers: Tiers | None = None
    tenant: str = SOLE_TENANT
    label: str = "all"
    reason: str | None = None
    gaps_s: Sequence[float] = ()
    price_nusd: int | None = None
    replica: str = ""
    stall_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it was answered whole and as asked."""
        return self.outcome is Outcome.OK

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def time_to_publish_s(self) -> float | None:
        """Time to the first token that a reader sees."""
        return None if self.publish_s is None else self.publish_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s

    def kept(self, slo: Slo) -> bool:
        """Whether it was answered as promised."""
        return self.ok and slo.met(self.ttft_s, self.tpot_s)


class Sample(NamedTuple):
    """The server at one moment. Cached, prompt and output tokens count from the run's beginning;
    bytes are what each tier holds. None: not told."""

    at_s: float
    running: float | None = None
    waiting: float | None = None
    prompt_tokens: float | None = None
    cached_device_tokens: float | None = None
    cached_dram_tokens: float | None = None
    cached_redis_tokens: float | None = None
    device_bytes: float | None = None
    dram_bytes: float | None = None
    redis_bytes: float | None = None


class ClientHealth(NamedTuple):
    """Whether the client was fit to measure: how late its own event loop was (`lag_*`), how late it
    sent (`late_*`), and the share of one core it used. `complaints` are lines for a reader who
    should not trust some figures; empty if it was."""

    lag_p99_s: float
    lag_max_s: float
    late_p99_s: float
    late_max_s: float
    cpu_share: float
    most_open: int
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A load that was run once, with all that is needed to say what was measured and to repeat it.

    `name` is what tables call the server or setting, `target` and `workload` describe both in one
    line, `settings` in full. `began_at` is an ISO 8601 time, `wall_s` how long it took from the
    first sending to the last end. `notes` are lines that a reader of the figures has to know.
    """

    name: str
    kind: Literal["live", "simulated"]
    target: str
    workload: str
    command: str
    began_at: str
    wall_s: float
    records: Sequence[Record]
    tenants: tuple[TenantPlan, ...] = (TenantPlan(),)
    settings: Mapping[str, str] = field(default_factory=dict)
    machine: tuple[str, ...] = ()
    timeline: tuple[Sample, ...] = ()
    client: ClientHealth | None = None
    usd_per_hour: float | None = None
    notes: tuple[str, ...] = ()
