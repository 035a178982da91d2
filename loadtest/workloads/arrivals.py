"""When sessions begin."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from loadtest.plan import Session
from loadtest.workloads.randomness import drawer

Pattern = Literal["closed", "constant", "poisson", "gamma"]
PATTERNS: tuple[Pattern, ...] = ("closed", "constant", "poisson", "gamma")


@dataclass(frozen=True, slots=True)
class Closed:
    """So many clients, each beginning its next session when its last has ended."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")

    def __str__(self) -> str:
        return f"{self.concurrency} at a time"


@dataclass(frozen=True, slots=True)
class Open:
    """`rate` sessions per second on average, whatever becomes of those before.

    The times between two are gamma distributed with coefficient of variation `cv` (shape 1 / cv²,
    mean 1 / rate): 0 is a constant rate, 1 a Poisson process, and more comes in bursts.
    """

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise ValueError(f"rate must be more than 0, not {self.rate}")
        if not (self.cv >= 0 and math.isfinite(self.cv)):
            raise ValueError(f"cv must be at least 0, not {self.cv}")

    def __str__(self) -> str:
        kind = {0.0: "at a constant rate", 1.0: "Poisson"}.get(self.cv, f"gamma, cv {self.cv:g}")
        return f"{self.rate:g}/s, {kind}"

    def times_s(self, seed: int) -> Iterator[float]:
        """Without end. At a constant rate from 0 on; else from the first gap's end."""
        if self.cv == 0:
            return (index / self.rate for index in count())
        return self._drawn_s(drawer(f"arrivals/{seed}"))

    def _drawn_s(self, draw: random.Random) -> Iterator[float]:
        at_s = 0.0
        while True:
            at_s += gamma(1 / self.rate, self.cv, draw)
            yield at_s


Arrivals = Closed | Open


def arrivals_of(
    pattern: Pattern,
    *,
    rate: float | None = None,
    cv: float | None = None,
    concurrency: int | None = None,
) -> Arrivals:
    """What the names of options say. Raises ValueError that begins with the option which is
    missing, wrong, or of no use to the pattern."""
    wanted = {
        "closed": ("concurrency",),
        "constant": ("rate",),
        "poisson": ("rate",),
        "gamma": ("rate", "cv"),
    }.get(pattern)
    if wanted is None:
        raise ValueError(f"no arrivals {pattern}; there are {', '.join(PATTERNS)}")
    for name, value in (("rate", rate), ("cv", cv), ("concurrency", concurrency)):
        if (value is not None) != (name in wanted):
            verb = "is needed" if name in wanted else "is of no use"
            raise ValueError(f"{name} {verb} where arrivals are {pattern}")
    if concurrency is not None:
        return Closed(concurrency)
    assert rate is not None  # wanted by all the others
    return Open(rate, {"constant": 0.0, "poisson": 1.0}.get(pattern, cv or 0.0))


def with_arrivals(sessions: Iterable[Session], arrivals: Open, seed: int) -> Iterator[Session]:
    """The sessions in their order, at drawn times; as many as there are, maybe without end."""
    for at_s, session in zip(arrivals.times_s(seed), sessions, strict=False):
        yield replace(session, start_s=at_s)


def gamma(mean: float, cv: float, draw: random.Random) -> float:
    """A gamma distributed number with this mean and coefficient of variation; the mean itself for
    a cv of 0."""
    if cv == 0 or mean == 0:
        return mean
    shape = cv**-2
    return draw.gammavariate(shape, mean / shape)
