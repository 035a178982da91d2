"""Which tier prompt tokens came from, in each step of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loadtest.columns import Columns, Floats
from loadtest.record import Sample
from loadtest.report.over_time import Steps


class TierName(NamedTuple):
    """A part of the prompt tokens as a reader knows it, and its colour."""

    label: str
    colour: str


DEVICE = TierName("device", "c-device")
DRAM = TierName("DRAM", "c-dram")
REDIS = TierName("Redis", "c-redis")
SOME_TIER = TierName("cached, tier unknown", "c-dram")


@dataclass(frozen=True, slots=True)
class TierShares:
    """Of the prompt tokens of each step between `edges` the share that came from each tier, NaN for
    a step without prompt tokens. `source` says in a few words where it is from."""

    edges: list[float]
    shares: dict[TierName, list[float]]
    source: str


def tier_shares(timeline: Sequence[Sample], columns: Columns, steps: Steps) -> TierShares | None:
    """From what the server told of itself, else from what its answers said; None if neither says
    anything of the cache."""
    return _from_samples(timeline, steps) or _from_answers(columns, steps)


def _from_samples(timeline: Sequence[Sample], steps: Steps) -> TierShares | None:
    fields = {
        DEVICE: "cached_device_tokens",
        DRAM: "cached_dram_tokens",
        REDIS: "cached_redis_tokens",
    }
    whole = [sample for sample in timeline if sample.prompt_tokens is not None]
    known = {
        tier: field
        for tier, field in fields.items()
        if any(getattr(sample, field) is not None for sample in whole)
    }
    if len(whole) < 2 or not known:
        return None
    at_s = np.array([sample.at_s for sample in whole])
    # No finer than the samples are, or what comes between two of them would be made up.
    count = min(len(steps.edges) - 1, len(whole) - 1)
    edges = np.linspace(at_s[0], at_s[-1], count + 1)
    prompt = _gained(edges, at_s, [sample.prompt_tokens or 0.0 for sample in whole])
    cached = {
        tier: _gained(edges, at_s, [getattr(sample, field) or 0.0 for sample in whole])
        for tier, field in known.items()
    }
    return TierShares(edges.tolist(), _shares(cached, prompt), "told by the server")


def _from_answers(columns: Columns, steps: Steps) -> TierShares | None:
    known = ~np.isnan(columns.cached_tokens) & ~np.isnan(columns.first_s)
    if not known.any():
        return None
    times = columns.first_s[known]
    prompt = steps.total(times, columns.prompt_tokens[known].astype(float))
    if np.isnan(columns.device_tokens[known]).any():
        cached = {SOME_TIER: steps.total(times, columns.cached_tokens[known])}
    else:
        cached = {
            DEVICE: steps.total(times, columns.device_tokens[known]),
            DRAM: steps.total(times, columns.dram_tokens[known]),
            REDIS: steps.total(times, columns.redis_tokens[known]),
        }
    return TierShares(steps.edges.tolist(), _shares(cached, prompt), "told by each answer")


def _gained(edges: Floats, at_s: Floats, counter: Sequence[float]) -> Floats:
    return np.maximum(np.diff(np.interp(edges, at_s, counter)), 0.0)


def _shares(cached: dict[TierName, Floats], prompt: Floats) -> dict[TierName, list[float]]:
    """A tier's counter may run ahead of the prompts' for a moment, so the whole is the larger of
    what was asked for and what was found."""
    whole = np.maximum(prompt, np.sum(list(cached.values()), axis=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return {tier: (tokens / whole).tolist() for tier, tokens in cached.items()}
