"""From options to what is to be sent: a workload or a plan, its pace and promise."""

from __future__ import annotations

import math
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.cli.errors import say
from loadtest.contenders import Keys
from loadtest.demo_key import existing_demo_key
from loadtest.measuring import Manner
from loadtest.plan import Load, Session, TenantPlan
from loadtest.stats.cost import parse_price
from loadtest.vocabulary import DEFAULT_VOCABULARY, Vocabulary
from loadtest.wire.connection import checked_key
from loadtest.workloads.arrivals import PATTERNS, Arrivals, Closed, Open, arrivals_of
from loadtest.workloads.base import Workload
from loadtest.workloads.building import build_load
from loadtest.workloads.plan_file import Plan, read_plan
from loadtest.workloads.randomness import derived_seed
from loadtest.workloads.registry import make_workload, parse_settings
from loadtest.workloads.unique import Unique
from policies.slo import Slo

USUAL_WORKLOAD = "shared-prompts"
_USUAL_TARGET = 0.95


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
            if self.concurrency is not None and (self.rate, self.cv) != (None, None):
                other = "--rate" if self.rate is not None else "--cv"
                raise ValueError(
                    f"{other} and --concurrency: give one of them: arrivals at their times, or so "
                    "many clients that each wait for an answer"
                )
            if self.concurrency is not None:
                pattern = "closed"
            elif self.cv is not None:
                pattern = "gamma"
            elif self.rate is not None:
                pattern = "poisson"
            else:
                return None
        if pattern not in PATTERNS:
            raise ValueError(f"--arrivals: no {pattern}; there are {', '.join(PATTERNS)}")
        try:
            return arrivals_of(pattern, rate=self.rate, cv=self.cv, concurrency=self.concurrency)
        except ValueError as error:  # which begins with an option's name
            raise ValueError(f"--{error}") from None


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
            self.source.check_speeds()
            return self.source.load(seed=seed, speed=rate, vocabulary=self.vocabulary)
        chosen = self.pace.chosen()
        if isinstance(chosen, Closed):
            raise ValueError("concurrency: a closed loop has no rate")
        return self._built(Open(rate, 1.0 if chosen is None else chosen.cv), seed)

    def highest_rate(self) -> float:
        """Sessions per second that it has for all the seconds that it is sent; at more than that, a
        run would be over before it shows anything. Raises ValueError."""
        seconds = self.pace.seconds
        if isinstance(self.source, Plan) or self.source.usual_requests is not None or not seconds:
            return math.inf
        return sum(1 for _ in self.source.sessions(self.seed, self.vocabulary)) / seconds

    def warm_up_sessions(self) -> Sequence[Session]:
        """Of the same kind, but with prompts that come nowhere else. Raises ValueError."""
        if not self.warm_up:
            return ()
        seed = derived_seed(self.seed, "warm-up")
        if isinstance(self.source, Plan):
            return self.source.warm_up(seed, self.warm_up, self.vocabulary)
        return build_load(
            # Recorded texts would warm the cache for themselves.
            self.source if self.source.ever_new else Unique(api="chat"),
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
    workload: str | None,
    settings: Sequence[str],
    plan: Path | None,
    pace: Pace,
    slo: Slo,
    *,
    seed: int | None,
    vocabulary: int,
    warm_up: int,
) -> Wanted:
    """The seed is the given one, the plan's, or one that is drawn and said. Raises ValueError for
    whatever is wrong with it, OSError for a plan that cannot be read."""
    tokens = Vocabulary(end=vocabulary)
    if plan is None:
        source = make_workload(workload or USUAL_WORKLOAD, parse_settings(settings))
        tenant = TenantPlan(slo=slo)
        return Wanted(_seeded(seed), source, pace, tenant, tokens, warm_up)
    if workload is not None:
        raise ValueError("--workload: is of no use with --plan, whose tenants have their own")
    if settings or pace != Pace():
        raise ValueError("--plan: has its own parameters, arrivals and numbers of requests")
    if slo.promises:
        raise ValueError("--plan: has its tenants' own promises")
    planned = read_plan(plan)
    seed = _seeded(planned.seed if seed is None else seed)
    return Wanted(seed, planned, vocabulary=tokens, warm_up=warm_up)


def _seeded(seed: int | None) -> int:
    if seed is None:
        # One that no earlier run had: else a warm cache would pass for a cold one.
        seed = secrets.randbelow(1 << 32)
        say(f"seed {seed}")
    return seed


def slo_of(ttft_ms: float | None, tpot_ms: float | None, target: float | None) -> Slo:
    """What options promise. Raises ValueError for a target of nothing."""
    slo = Slo(
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
        target=_USUAL_TARGET if target is None else target,
    )
    if target is not None and not slo.promises:
        raise ValueError("--target: is the share for which --ttft-ms or --tpot-ms has to hold")
    return slo


def manner_of(
    what: Wanted,
    tenants: Sequence[TenantPlan],
    warm: Sequence[Session],
    *,
    timeout_s: float,
    price: str | None,
    usd_per_hour: float | None,
) -> Manner:
    """How its loads are measured, as options say; `warm` is what is sent before them. Raises
    ValueError for a price that is none, and as `keys_of` does."""
    requests = sum(len(session.turns) for session in warm)
    try:
        given = None if price is None else parse_price(price)
    except ValueError as error:
        raise ValueError(f"--price: {error}") from None
    return Manner(
        command=this_command(what.seed),
        keys=keys_of(tenants),
        settings={
            "warm-up requests": str(requests),
            "time limit of an answer": f"{timeout_s:g} s",
        },
        price=given,
        usd_per_hour=usd_per_hour,
    )


def keys_of(tenants: Sequence[TenantPlan]) -> Mapping[str, str]:
    """The keys of those that have their own. Raises ValueError if a variable is not set, or holds
    what is no key."""
    keys = {}
    for tenant in tenants:
        if tenant.key_env is not None:
            key = os.environ.get(tenant.key_env)
            if not key:
                raise ValueError(f"tenants {tenant.name}: {tenant.key_env} is not set")
            try:
                checked_key(key)
            except ValueError as error:
                raise ValueError(f"{tenant.key_env}: {error}") from None
            keys[tenant.name] = key
    return keys


def entry_keys(key: str | None, tenants: Mapping[str, str]) -> Keys:
    """How one gets in at the servers, with the option's key and those of the load's tenants."""
    return Keys(
        key=key,
        tenant_key=next(iter(tenants.values()), None),
        demo_key=existing_demo_key(os.environ),
    )


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
