"""What is simulated: a fleet, what it is made of, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass

from policies.batching import Batching
from policies.cost import Coefficients
from policies.routing_policies import BUILT_IN
from policies.slo import Slo

_CONTINUOUS = Batching()


@dataclass(frozen=True, slots=True)
class Split:
    """Replicas of which `prefill` compute prompts and `decode` generate answers. A prompt's KV
    moves from one to the other in `latency_s` and `token_s` for each of its tokens."""

    prefill: int
    decode: int
    latency_s: float = 1e-3
    token_s: float = 2.6e-6

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise ValueError(f"a split of {self.prefill}:{self.decode} lacks one of its sides")
        if self.latency_s < 0 or self.token_s < 0:
            raise ValueError("moving KV takes no negative time")


@dataclass(frozen=True, slots=True)
class SimSpec:
    """A fleet of equal replicas.

    `cost` says what work takes, its `step_tokens` included (the chunk size), `max_running` how many
    sequences a replica runs at once. Capacities are in tokens of KV: `device_tokens` and
    `dram_tokens` of each replica, `redis_tokens` of all together; 0 is no such tier. Without
    `prompt_cache` nothing is found or kept.

    `policy` is a name of `policies.routing_policies.BUILT_IN`. Of more than twice as many replicas
    as `shortlist` says, the policy is shown so many (`policies.routing_shortlist`); 0: always all.
    What routing knows of begun and ended requests is `report_delay_s` old, what it knows of caches
    `directory_delay_s`.

    `admission` lets requests in by their tenants' promises; `max_queue_s` is the most work that may
    be in front of one. Not `fair` is first come, first served. `slo` is in place of every tenant's
    own. `oracle` gives all replicas one cache without bounds, which no real fleet has.

    Each step takes what the cost model says times a factor whose logarithm has the standard
    deviation `noise`.
    """

    cost: Coefficients
    device_tokens: int
    replicas: int = 1
    max_running: int = 128
    dram_tokens: int = 0
    redis_tokens: int = 0
    prompt_cache: bool = True
    policy: str = "predicted-ttft"
    shortlist: int = 16
    report_delay_s: float = 0.0
    directory_delay_s: float = 0.0
    admission: bool = False
    max_queue_s: float = 60.0
    fair: bool = True
    slo: Slo | None = None
    batching: Batching = _CONTINUOUS
    split: Split | None = None
    oracle: bool = False
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be simulated."""
        if self.policy not in BUILT_IN:
            raise ValueError(f"policy is one of {', '.join(BUILT_IN)}, not {self.policy}")
        for name in ("replicas", "max_running", "device_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        names = ("dram_tokens", "redis_tokens", "shortlist", "report_delay_s", "noise")
        for name in (*names, "directory_delay_s", "max_queue_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, is {getattr(self, name)}")
        if self.max_running > self.cost.step_tokens:
            raise ValueError(
                f"{self.max_running} sequences do not fit a step of {self.cost.step_tokens} tokens"
            )
        if self.split is not None and self.split.prefill + self.split.decode != self.replicas:
            raise ValueError(
                f"{self.split.prefill}:{self.split.decode} is no split of {self.replicas} replicas"
            )
        if self.batching.mode != "continuous" and self.batching.size > self.max_running:
            raise ValueError(f"a batch of {self.batching.size} is more than {self.max_running} run")

    @property
    def entry_replicas(self) -> int:
        """How many of the replicas, the first ones, take requests."""
        return self.replicas if self.split is None else self.split.prefill
