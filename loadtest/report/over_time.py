"""A run in equal steps of time: what was sent, answered and waited for in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.columns import Columns, Floats
from loadtest.record import Outcome, Sample

_FEWEST_STEPS = 12
_MOST_STEPS = 60
_REQUESTS_A_STEP = 8
_MOST_POINTS = 60


@dataclass(frozen=True, slots=True)
class Steps:
    """`edges` are the bounds of the steps in seconds from the run's beginning."""

    edges: Floats

    @classmethod
    def of(cls, requests: int, end_s: float) -> Steps:
        """As many steps as show how it went without showing noise: about eight requests in each,
        within 12 to 60."""
        count = min(_MOST_STEPS, max(_FEWEST_STEPS, requests // _REQUESTS_A_STEP))
        return cls(np.linspace(0.0, end_s if end_s > 0 else 1.0, count + 1))

    @property
    def width_s(self) -> float:
        """How long one is."""
        return float(self.edges[1] - self.edges[0])

    @property
    def middles(self) -> list[float]:
        """The middle of each."""
        return _listed((self.edges[:-1] + self.edges[1:]) / 2)

    def rate(self, times_s: Floats) -> list[float]:
        """How many of these moments lie in each step, per second."""
        return _listed(np.histogram(times_s, self.edges)[0] / self.width_s)

    def total(self, times_s: Floats, amounts: Floats) -> Floats:
        """The sum of what belongs to these moments, in each step."""
        return np.histogram(times_s, self.edges, weights=amounts)[0]

    def percentiles(self, times_s: Floats, values: Floats, *shares: float) -> list[list[float]]:
        """For each share the percentile of the values in every step, NaN where there are none.
        Values that are NaN are left out."""
        known = ~np.isnan(values)
        times_s, values = times_s[known], values[known]
        order = np.argsort(times_s, kind="stable")
        bounds = np.searchsorted(times_s[order], self.edges)
        bounds[-1] = len(order)
        found: list[list[float]] = [[] for _ in shares]
        for low, high in pairwise(bounds):
            inside = values[order[low:high]]
            here = np.quantile(inside, shares) if inside.size else np.full(len(shares), np.nan)
            for place, value in zip(found, here.tolist(), strict=True):
                place.append(value)
        return found

    def unanswered(self, columns: Columns) -> list[float]:
        """How many requests were sent and not yet ended, in the middle of each step."""
        sent, ended = np.sort(columns.sent_s), np.sort(columns.ended_s)
        middles = np.array(self.middles)
        began = np.searchsorted(sent, middles, side="right")
        return _listed(began - np.searchsorted(ended, middles, side="right"))

    def output_rate(self, columns: Columns) -> list[float]:
        """Output tokens per second in each step. An answer's first token came when it did, the
        others evenly between it and the last."""
        answered = ~np.isnan(columns.first_s) & (columns.output_tokens > 0)
        first, last = columns.first_s[answered], columns.last_s[answered]
        more = (columns.output_tokens[answered] - 1).astype(float)
        length = np.where(np.isnan(last) | (last <= first), 1e-9, last - first)
        up_to = [
            float(np.sum(edge >= first) + np.sum(more * np.clip((edge - first) / length, 0, 1)))
            for edge in self.edges
        ]
        return _listed(np.diff(up_to) / self.width_s)

    def failures(self, columns: Columns) -> dict[Outcome, list[float]]:
        """How many requests failed in each step, by outcome, of those that occurred."""
        return {
            outcome: _listed(np.histogram(columns.ended_s[rows], self.edges)[0])
            for outcome, rows in columns.outcome.groups().items()
            if outcome is not Outcome.OK
        }


def end_of(columns: Columns, wall_s: float) -> float:
    """When the run was over: at its last end, or later."""
    return max(wall_s, float(columns.ended_s.max()) if len(columns) else 0.0)


def sent_rate(columns: Columns) -> float | None:
    """Requests per second while they were to be sent; None for fewer than two moments."""
    if len(columns) < 2:
        return None
    span = float(columns.due_s.max() - columns.due_s.min())
    return (len(columns) - 1) / span if span > 0 else None


def told(timeline: Iterable[Sample], field: str) -> list[tuple[float, float]]:
    """What the server told of itself over time (`field` names a figure of `Sample`); where there
    are more than 60 samples, the means of as many neighbours as it takes. Empty if it did not."""
    points = [
        (sample.at_s, float(value))
        for sample in timeline
        if (value := getattr(sample, field)) is not None
    ]
    every = -(-len(points) // _MOST_POINTS) if points else 1
    neighbours = (points[at : at + every] for at in range(0, len(points), every))
    return [(fmean(at_s for at_s, _ in few), fmean(y for _, y in few)) for few in neighbours]


def _listed(values: NDArray[Any]) -> list[float]:
    return [float(value) for value in values]
