"""How long it takes to hash a prompt and to decide where it goes, as the rooms' own benches say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadtest.bench.module import json_of_module

_DECIDE = "gateway.dispatch.bench_decide"
_DIRECTORY = "cache.bench_directory"


@dataclass(frozen=True, slots=True)
class DecisionFigure:
    """One thing that is done for a request, in microseconds of CPU time. `aim_*` are what it is
    held against, None where nothing is."""

    what: str
    p50_us: float
    p99_us: float
    aim_p50_us: float | None = None
    aim_p99_us: float | None = None


@dataclass(frozen=True, slots=True)
class DecisionFigures:
    """`bytes_per_block` is what the directory's process grew by."""

    blocks: int
    replicas: int
    prompt_tokens: int
    bytes_per_block: float
    rows: tuple[DecisionFigure, ...]


async def measure_decision() -> DecisionFigures:
    """One prompt length, one fleet. Raises CampaignError."""
    decided = await json_of_module(_DECIDE)
    looked_up = await json_of_module(_DIRECTORY)
    return read_decision(decided, looked_up)


def read_decision(decided: dict[str, Any], looked_up: dict[str, Any]) -> DecisionFigures:
    """From what `gateway.dispatch.bench_decide` and `cache.bench_directory` print."""

    def row(
        what: str, times: dict[str, float], p50: float | None = None, p99: float | None = None
    ) -> DecisionFigure:
        return DecisionFigure(what, times["p50_us"], times["p99_us"], p50, p99)

    return DecisionFigures(
        blocks=decided["blocks"],
        replicas=decided["replicas"],
        prompt_tokens=decided["prompt_tokens"],
        bytes_per_block=looked_up["resident_bytes"] / 1e6,
        rows=(
            row("hashing the prompt", decided["hashing"], 500.0),
            row("decision, nobody knows the prompt", decided["cold"], 100.0, 500.0),
            row("decision, all know its beginning", decided["system_prompt"], 100.0, 500.0),
            row("decision, a few know part of it", decided["warm_on_few"], 100.0, 500.0),
            row("decision, all know it to ends of their own", decided["own_end_each"]),
            row("of it the directory, nobody", looked_up["cold"]),
            row("of it the directory, beginning", looked_up["system_prompt"]),
            row("of it the directory, a few", looked_up["half_warm_on_few"]),
            row("of it the directory, own ends", looked_up["own_end_each"]),
        ),
    )
