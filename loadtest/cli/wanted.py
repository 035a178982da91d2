"""From options to what is to be sent: a workload or a plan, its pace and promise."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from loadtest.cli.errors import say
from loadtest.plan import Load, Session, TenantPlan
from loadtest.vocabulary import DEFAULT_VOCABULARY, Vocabulary
from loadtest.workloads.arrivals import Arrivals, Closed, Open, Pattern, arrivals_of
from loadtest.workloads.base import Workload
from loadtest.workloads.building import build_load
from loadtest.workloads.plan_file import Plan, read_plan
from loadtest.workloads.registry import make_workload, parse_settings
from policies.slo import Slo

_WARM_UP_SEEDS = 1 << 40
"""Seeds of warm-ups begin here, and are nobody's else."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When sessions begin, and how many, as options say; None: as usual for the workload."""

    arrivals: str | None = None
    rate: float | None = None
    cv: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    seconds: float | None = None

    def chosen(self) -> Arrivals | None:
        """Raises ValueError for options that do not fit together."""
        pattern = self.arrivals
        if pattern is None:
            if self.concurrency is not None:
                pattern = "closed"
            elif self.cv is not None:
                pattern = "gamma"
            elif self.rate is not None:
                pattern = "poisson"
            else:
                return None
        # it says itself which patterns there are
        return arrivals_of(
            cast(Pattern, pattern), rate=self.rate, cv=self.cv, concurrency=self.concurrency
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be sent, whichever rate and seed a run has: a workload at a pace, or a plan."""

    seed: int
    source: Workload | Plan
    pace: Pace = field(default_factory=Pace)
    tenant: TenantPlan = field(default_factory=TenantPlan)
    vocabulary: Vocabulary = DEFAULT_VOCABULARY
    warm_up: int = 0

    def load(self, seed: int | None = None) -> Load:
        """As it is wanted. Raises ValueError."""
        seed = self.seed if seed is None else seed
        if isinstance(self.source, Plan):
            return self.source.load(seed=seed, vocabulary=self.vocabulary)
        return self._built(self.pace.chosen(), seed)

    def load_at(self, rate: float, seed: int) -> Load:
        """At another rate: sessions per second, or for a plan how many times as fast as it is.
        Raises ValueError."""
        if isinstance(self.source, Plan):
            return self.source.load(seed=seed, speed=rate, vocabulary=self.vocabulary)
        chosen = self.pace.chosen()
        if isinstance(chosen, Closed):
            raise ValueError("concurrency: a closed loop has no rate")
        return self._built(Open(rate, 1.0 if chosen is None else chosen.cv), seed)

    def warm_up_sessions(self) -> Sequence[Session]:
        """Of the same kind, but with prompts that come nowhere else. Raises ValueError."""
        if not self.warm_up:
            return ()
        seed = _WARM_UP_SEEDS + self.seed
        if isinstance(self.source, Plan):
            return self.source.load(seed=seed, vocabulary=self.vocabulary).sessions[: self.warm_up]
        return build_load(
            self.source,
            arrivals=Closed(1),
            requests=self.warm_up,
            seed=seed,
            vocabulary=self.vocabulary,
            tenant=self.tenant,
        ).sessions

    def _built(self, arrivals: Arrivals | None, seed: int) -> Load:
        assert isinstance(self.source, Workload)
        return build_load(
            self.source,
            arrivals=arrivals,
            requests=self.pace.requests,
            seconds=self.pace.seconds,
            seed=seed,
            vocabulary=self.vocabulary,
            tenant=self.tenant,
        )


def wanted(
    workload: str,
    settings: Sequence[str],
    plan: Path | None,
    pace: Pace,
    slo: Slo,
    *,
    seed: int | None,
    vocabulary: int,
    warm_up: int,
) -> Wanted:
    """Raises ValueError for whatever is wrong with it, OSError for a plan that cannot be read."""
    if seed is None:
        # One that no earlier run had: else a warm cache would pass for a cold one.
        seed = secrets.randbelow(1 << 32)
        say(f"seed {seed}")
    tokens = Vocabulary(end=vocabulary)
    if plan is None:
        source = make_workload(workload, parse_settings(settings))
        tenant = TenantPlan(slo=slo)
        found = Wanted(seed, source, pace, tenant, tokens, warm_up)
    else:
        if settings or pace != Pace():
            raise ValueError("--plan: has its own parameters, arrivals and numbers of requests")
        if slo.promises:
            raise ValueError("--plan: has its tenants' own promises")
        found = Wanted(seed, read_plan(plan), vocabulary=tokens, warm_up=warm_up)
    return found


def slo_of(ttft_ms: float | None, tpot_ms: float | None, target: float) -> Slo:
    """What options promise."""
    return Slo(
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
        target=target,
    )


def run_settings(warm_up: int, timeout_s: float) -> dict[str, str]:
    """What else a reader wants to know of a run."""
    return {"warm-up requests": str(warm_up), "time limit of an answer": f"{timeout_s:g} s"}


def keys_of(tenants: Sequence[TenantPlan]) -> Mapping[str, str]:
    """The keys of those that have their own. Raises ValueError if a variable is not set."""
    keys = {}
    for tenant in tenants:
        if tenant.key_env is not None:
            key = os.environ.get(tenant.key_env)
            if not key:
                raise ValueError(f"tenants {tenant.name}: {tenant.key_env} is not set")
            keys[tenant.name] = key
    return keys


def this_command(seed: int) -> str:
    """The command line, to be given again: without a key, with the seed that was drawn."""
    words = ["forebay", "loadtest"]
    hidden = False
    for word in sys.argv[1:]:
        if hidden:
            hidden = False
            continue
        if word == "loadtest" and len(words) == 2:
            continue
        if word == "--key":
            hidden = True
            continue
        if word.startswith("--key="):
            continue
        words.append(word)
    if not any(word == "--seed" or word.startswith("--seed=") for word in words):
        words += ["--seed", str(seed)]
    return shlex.join(words)
