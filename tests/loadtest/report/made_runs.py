"""Runs as a small queue makes them, the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from loadtest.plan import TenantPlan
from loadtest.record import ClientHealth, Outcome, Record, Run, Sample, Tiers
from policies.slo import Slo

ACME = TenantPlan("acme", slo=Slo(ttft_s=0.5, tpot_s=0.12))
BATCH = TenantPlan("batch", slo=Slo(ttft_s=5.0, target=0.9))
FREE = TenantPlan("free")

HEALTHY = ClientHealth(0.0008, 0.003, 0.0009, 0.004, 0.23, 7)


def answer(
    index: int,
    sent_s: float,
    *,
    ttft_s: float = 0.1,
    tpot_s: float = 0.02,
    output_tokens: int = 11,
    tenant: str = "acme",
    label: str = "all",
    prompt_tokens: int = 100,
    tiers: Tiers | None = None,
) -> Record:
    """A whole answer."""
    first_s = sent_s + ttft_s
    last_s = first_s + tpot_s * (output_tokens - 1)
    return Record(
        index,
        sent_s,
        sent_s,
        last_s,
        Outcome.OK,
        prompt_tokens,
        output_tokens,
        first_s,
        last_s,
        first_s,
        None if tiers is None else sum(tiers),
        tiers,
        tenant,
        label,
        gaps_s=(tpot_s,) * (output_tokens - 1),
    )


def failure(index: int, sent_s: float, outcome: Outcome, reason: str = "no") -> Record:
    """A request that came to nothing a tenth of a second after it was sent."""
    return Record(index, sent_s, sent_s, sent_s + 0.1, outcome, tenant="acme", reason=reason)


def run_of(
    records: Sequence[Record], tenants: tuple[TenantPlan, ...] = (ACME,), name: str = "forebay"
) -> Run:
    """A live run with these records."""
    return Run(
        name,
        "live",
        f"{name} 1.0 at 127.0.0.1:8000",
        "shared system prompts",
        "forebay loadtest run --rate 4",
        "2026-03-01T14:05:09+00:00",
        max((record.ended_s for record in records), default=0.0),
        records,
        tenants,
        settings={"seed": "1"},
        machine=("CPU: one, 2 cores",),
        client=HEALTHY,
    )


def queue(rate: float, requests: int, seed: int = 0, name: str = "forebay") -> Run:
    """Poisson arrivals at one server that takes half a second for each: TTFT bends upwards towards
    two per second. Every tenth prompt of the later ones comes from DRAM, the others from the
    device."""
    draw = random.Random(seed)
    sent_s = free_s = 0.0
    records: list[Record] = []
    for index in range(requests):
        sent_s += draw.expovariate(rate)
        begins_s = max(sent_s, free_s)
        ttft_s = begins_s - sent_s + 0.05 * draw.lognormvariate(0, 0.3)
        tpot_s = 0.045 * draw.lognormvariate(0, 0.1)
        tiers = Tiers(dram=48) if index % 10 == 0 else Tiers(device=32)
        label = "hit" if index % 2 else "cold"
        records.append(
            answer(index, sent_s, ttft_s=ttft_s, tpot_s=tpot_s, tiers=tiers, label=label)
        )
        free_s = records[-1].ended_s
    end_s = records[-1].ended_s
    timeline = tuple(
        Sample(
            float(second),
            running=1.0,
            waiting=float(second % 3),
            prompt_tokens=100.0 * second,
            cached_device_tokens=30.0 * second,
            cached_dram_tokens=10.0 * second,
            cached_redis_tokens=0.0,
            device_bytes=1e6 * second,
        )
        for second in range(int(end_s))
    )
    return replace(run_of(records, name=name), timeline=timeline)
