"""The cache part of `make bench`: what the lower tiers bring, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from loadtest.bench.cache_copies import Movement, measure_movements
from loadtest.bench.cache_pairs import PairedRatio, cell_ratio
from loadtest.bench.cache_ttft import TtftFigure, measure_ttft
from loadtest.bench.cache_valkey import running_valkey
from loadtest.bench.campaign import CampaignError, Contender, Report, Tell, run_campaign
from loadtest.bench.cells import cells_of
from loadtest.bench.workloads import Workload
from loadtest.forebay_server import MODEL, running_forebay
from loadtest.target import Target

UNIQUE = Workload("unique", "8 streams, 512 in, 16 out, no prompt twice", 8, 32, 0, 512, 16)
CROWDED = Workload(
    "W3-crowded",
    "16 streams, 16 prefixes of 1,024 in turn + 64 own in, 32 out",
    16,
    128,
    1024,
    64,
    32,
    prefixes=16,
)
"""W3 with more prefixes than the device pool below has room for."""

_ON, _OFF = "tiers on", "tiers off"
_LOWER_OFF = {
    "FOREBAY_REDIS__URL": "off",
    "FOREBAY_MODELS__0__CACHE__DRAM": "0",
}
_TIGHT_POOL = {
    "FOREBAY_MODELS__0__DTYPE": "bfloat16",
    "FOREBAY_MODELS__0__CACHE__DEVICE": "128MiB",
}
"""Room for 5,825 tokens: five prompts of W3, or eleven unique ones, so that both push out."""
_LEAST_PAIRS = 12
_SETTLING_RUNS = 6
"""Until it has seen that nothing is asked for again, a fresh server writes blocks down on trust,
for about a third of what its lower tiers hold: of unique prompts here some 190."""
_PAIRS_PER_REPEAT = 4


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload with all tiers on against all lower tiers off: the ratio on / off by cell."""

    workload: Workload
    reports: tuple[Report, ...]
    ratios: Mapping[str, PairedRatio]


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What the cache part found."""

    ttft: tuple[TtftFigure, ...]
    movements: tuple[Movement, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def failures(self) -> list[str]:
        """Every request without a whole answer."""
        return [
            line
            for comparison in self.comparisons
            for report in comparison.reports
            for line in report.failures
        ]


async def measure_cache(*, repeats: int, seed: int, tell: Tell) -> CacheFigures:
    """All of it, some minutes long. Raises CampaignError if something cannot be measured."""
    with running_valkey() as valkey:
        tell("copies and Redis transfers")
        movements = await measure_movements([valkey.unix_url, valkey.tcp_url])
    with running_valkey() as valkey:  # another: the first belongs to whoever used it first
        ttft = await measure_ttft(valkey, repeats=repeats, seed=seed, tell=tell)
    pairs = max(_LEAST_PAIRS, _PAIRS_PER_REPEAT * repeats)
    comparisons = [
        await _compare(UNIQUE, pairs=pairs, settling=_SETTLING_RUNS, seed=seed, tell=tell),
        await _compare(CROWDED, pairs=max(2, repeats), settling=0, seed=seed, tell=tell),
    ]
    return CacheFigures(tuple(ttft), tuple(movements), tuple(comparisons))


async def _compare(
    workload: Workload, *, pairs: int, settling: int, seed: int, tell: Tell
) -> Comparison:
    """Both servers run at once, and take turns. So many runs of each come first that do not
    count."""
    async with AsyncExitStack() as servers:
        contenders = []
        for name, settings in ((_ON, _TIGHT_POOL), (_OFF, _TIGHT_POOL | _LOWER_OFF)):
            tell(f"starting forebay, {name}")
            server = await servers.enter_async_context(running_forebay(settings))
            contenders.append(Contender(Target(name, server.endpoint, MODEL), server.pid))
        if settling:
            tell("settling")
            await run_campaign(contenders, [workload], repeats=settling, seed=seed + 1, tell=tell)
        on, off = await run_campaign(contenders, [workload], repeats=pairs, seed=seed, tell=tell)
    ratios = {
        cell.label: ratio
        for cell in cells_of(workload)
        if (ratio := cell_ratio(cell, on.repetitions, off.repetitions)) is not None
    }
    if not ratios:
        why = (on.failures + off.failures or ["no reason given"])[0]
        raise CampaignError(f"{workload.name}: no two pairs of runs were answered; {why}")
    return Comparison(workload, (on, off), ratios)
