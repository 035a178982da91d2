"""How far the simulator is from what it simulates: the same loads, live and simulated.

    python -m loadtest.bench.validation [--seconds S] [--rounds N] [--seed N] [--markdown]

A forebay with one engine is started, and each load sent to it at a rate. Then its cost model, as
it has fitted it to the steps it ran, is asked for, and the same load simulated with it. Nothing
else is carried over: no figure of the live run is used to make the simulated one fit.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, NamedTuple

import orjson
import typer

from loadtest.bench.campaign import CampaignError, Tell
from loadtest.cli.errors import finished, say
from loadtest.forebay_server import KEY_VARIABLE, MODEL, running_forebay
from loadtest.machine import describe_machine
from loadtest.measuring import Manner, measured
from loadtest.plan import Load
from loadtest.record import Run
from loadtest.simulate.hardware import given_cost
from loadtest.simulate.simulation import simulate
from loadtest.simulate.spec import SimSpec
from loadtest.summary import summarize
from loadtest.tables import Table, number
from loadtest.target import Target
from loadtest.traces.chaining import trace_of
from loadtest.wire.connection import Endpoint, fetch
from loadtest.workloads.arrivals import Arrivals, Open
from loadtest.workloads.building import build_load
from loadtest.workloads.registry import make_workload
from policies.cost import Coefficients

_ADMIN_VARIABLE = "FOREBAY_ADMIN_KEY"
_BLOCK_TOKENS = 16
_DEVICE_MIB, _DRAM_MIB = 160, 512
"""Of the bundled model's KV in bfloat16 that is 7,281 tokens and 23,301: the first is too small for
the prefixes below, so that the tiers have something to do."""
_TOKENS_PER_MIB = 2**20 / 23_040
_MAX_RUNNING = 16
_WARM_UP = 16
_REST_S = 3.0


@dataclass(frozen=True, slots=True)
class Case:
    """A load that is run both ways; `rate` None: at the times that were recorded."""

    title: str
    workload: str
    parameters: dict[str, str]
    rate: float | None

    def load(self, seconds: float, seed: int) -> Load:
        """So many seconds of it."""
        arrivals: Arrivals | None = None if self.rate is None else Open(self.rate, 1.0)
        workload = make_workload(self.workload, self.parameters)
        return build_load(workload, arrivals=arrivals, seconds=seconds, seed=seed)


CASES = (
    Case("unique prompts", "unique", {"prompt_tokens": "512", "output_tokens": "32"}, 1.5),
    Case(
        "shared prompts",
        "shared-prompts",
        {"groups": "12", "prefix_tokens": "1024", "own_tokens": "64", "output_tokens": "32"},
        2.0,
    ),
    Case(
        "Mooncake / 32",
        "trace",
        {"length": "0.03125", "longest_tokens": "2000", "speed": "0.5", "spread": "true"},
        None,
    ),
)


class Seen(NamedTuple):
    """What either way gives."""

    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    output_tokens_per_s: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Validated:
    """One case, the medians over its rounds. `hit_rate` is cached over all prompt tokens."""

    title: str
    requests: int
    live: Seen
    simulated: Seen


async def validate(
    cases: Sequence[Case], *, seconds: float, rounds: int, seed: int, tell: Tell
) -> list[Validated]:
    """Every case, on a server of its own each round, whose caches are empty. Raises CampaignError,
    also for a request that was not answered."""
    found = []
    for case in cases:
        pairs = []
        requests = 0
        for turn in range(rounds):
            tell(f"{case.title}: {turn + 1} of {rounds}")
            load = case.load(seconds, seed * 1000 + turn)
            requests += load.requests
            pairs.append(await _both(case, load, seed))
        live, simulated = zip(*pairs, strict=True)
        found.append(Validated(case.title, requests, _middle(live), _middle(simulated)))
    return found


async def _both(case: Case, load: Load, seed: int) -> tuple[Seen, Seen]:
    async with _server() as (target, operator):
        warm = build_load(
            make_workload("unique", {"prompt_tokens": "400", "output_tokens": "24"}),
            arrivals=Open(2.0, 1.0),
            requests=_WARM_UP,
            seed=(1 << 40) + seed,
        )
        await measured(target, warm, Manner(command=""))  # the cost model learns from these
        await _flushed(operator)
        await asyncio.sleep(_REST_S)
        live = await measured(target, load, Manner(command=""))
        cost = await _cost(operator)
    failed = [record.reason for record in live.records if not record.ok]
    if failed:
        raise CampaignError(f"{case.title}: {len(failed)} requests failed, one with: {failed[0]}")
    spec = SimSpec(
        cost=cost,
        device_tokens=int(_DEVICE_MIB * _TOKENS_PER_MIB),
        dram_tokens=int(_DRAM_MIB * _TOKENS_PER_MIB),
        max_running=_MAX_RUNNING,
        seed=seed,
    )
    return _seen(live), _seen(simulate(trace_of(load, _BLOCK_TOKENS), spec).run)


def _seen(run: Run) -> Seen:
    whole = summarize(run).whole
    ttft, tpot = whole.latencies.ttft_ms, whole.latencies.tpot_ms
    if ttft is None or tpot is None:
        raise CampaignError("nothing was answered")
    return Seen(ttft.p50, ttft.p95, tpot.p50, whole.output_tokens_per_s, whole.cache.all or 0.0)


def _middle(seen: Sequence[Seen]) -> Seen:
    return Seen(*(median(values) for values in zip(*seen, strict=True)))


@asynccontextmanager
async def _server() -> AsyncIterator[tuple[Target, Endpoint]]:
    admin_key = secrets.token_urlsafe(32)
    config = (
        "models:\n"
        f"  - name: {MODEL}\n"
        "    path: bundled\n"
        "    dtype: bfloat16\n"
        f"    max_running: {_MAX_RUNNING}\n"
        f"    cache: {{device: {_DEVICE_MIB}MiB, dram: {_DRAM_MIB}MiB, redis: false}}\n"
        "redis: {url: 'off'}\n"
        f"tenants:\n  - {{id: loadtest, keys: [{{env: {KEY_VARIABLE}}}]}}\n"
    )
    async with running_forebay({_ADMIN_VARIABLE: admin_key}, config=config) as server:
        yield (
            Target("forebay", server.endpoint, MODEL),
            replace(server.endpoint, key=admin_key),
        )


async def _cost(operator: Endpoint) -> Coefficients:
    answer = await fetch(operator, "GET", "/admin/replicas")
    if answer.status != 200:
        raise CampaignError(f"/admin/replicas: status {answer.status}")
    return given_cost(orjson.loads(answer.body)["replicas"][0]["coefficients"])


async def _flushed(operator: Endpoint) -> None:
    answer = await fetch(operator, "POST", "/admin/cache/flush")
    if answer.status != 200:
        raise CampaignError(f"/admin/cache/flush: status {answer.status}")


def validation_table(found: Sequence[Validated]) -> Table:
    """Live, simulated, and how far the second is from the first."""
    names = ("TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms", "output tok/s")
    rows = []
    for each in found:
        rows += [
            (f"{each.title} ({each.requests}): {name}", number(live), number(simulated), off)
            for name, live, simulated in zip(names, each.live, each.simulated, strict=False)
            for off in (f"{simulated / live - 1:+.0%}",)
        ]
        live, simulated = each.live.hit_rate, each.simulated.hit_rate
        points = f"{(simulated - live) * 100:+.1f} points"
        rows.append((f"{each.title}: hit rate", f"{live:.1%}", f"{simulated:.1%}", points))
    return Table(("load (requests): figure", "live", "simulated", "off"), tuple(rows))


def main(
    seconds: Annotated[float, typer.Option(min=5, help="Of requests in each run.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    markdown: Annotated[bool, typer.Option("--markdown")] = False,
) -> None:
    """Run three loads against a forebay and through the simulator, and say how far it is off."""
    found = finished(validate(CASES, seconds=seconds, rounds=rounds, seed=seed, tell=say))
    table = validation_table(found)
    typer.echo("\n".join(describe_machine()))
    typer.echo(table.markdown() if markdown else table.text())


if __name__ == "__main__":
    typer.run(main)
