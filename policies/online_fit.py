"""Learning non-negative costs from measurements as they come.

Recursive least squares on the relative error, so that a short step counts as much as a long one,
kept as an information matrix. Forgetting is directional (Cao and Schwartz, Automatica 36, 2000): an
observation takes the place only of what older ones said about the same direction. Hours of nothing
but decode steps therefore leave what is known of prefill as it was, and the matrix well conditioned
with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Vector = NDArray[np.float64]

_PRIOR_WEIGHT = 1e-4
"""What the prior counts for, in observations."""
_FLOOR = 1e-5
"""No coefficient falls below this share of its prior: nothing is free, and what looks free is
mostly not told apart from something else."""
_FORGETTING = 0.01
_FAST_FORGETTING = 0.3
_SHARED_CHANGE = 0.25
"""A lasting change is mostly the machine's (a neighbour, a clock rate), and then of all
coefficients alike: in each step all follow by this power of the change that it shows."""
_CLIP = 1.5
_MOST_AT_ONCE = 1e4
_DAMPING = 1e-9
"""Share of each coefficient's own information that holds it where it is in one solve: bounds the
condition number, and moves nothing in the long run."""
_FRESH = 8
_TREND_RATE = 0.15
_TREND_LIMIT = 0.3
_ERROR_WINDOW = 200


class Trend:
    """How predictions of one kind of work have been doing lately.

    A single surprise is taken for noise, surprises in a row for a change: `judge` bounds the first
    to a factor of 1.5 of the prediction, and believes and quickly learns the second. The first 8
    observations are all believed: until then the prior may be far off.
    """

    __slots__ = ("_surprise", "count", "error")

    def __init__(self) -> None:
        self._surprise = 0.0
        self.count = 0
        self.error = 0.0
        """Mean absolute relative error of about the last 200 predictions."""

    def judge(self, predicted: float, value: float) -> tuple[float, bool]:
        """Take note of one prediction and what came true; the value to learn from, and whether it
        is to be learned fast."""
        self.count += 1
        error = abs(predicted - value) / value
        self.error += (error - self.error) / min(self.count, _ERROR_WINDOW)
        ratio = value / predicted
        if self.count <= _FRESH:
            return predicted * max(1 / _MOST_AT_ONCE, min(_MOST_AT_ONCE, ratio)), False
        surprise = max(-1.0, min(1.0, math.log(ratio)))
        self._surprise += _TREND_RATE * (surprise - self._surprise)
        changed = abs(self._surprise) > _TREND_LIMIT
        limit = _MOST_AT_ONCE if changed else _CLIP
        return predicted * max(1 / limit, min(limit, ratio)), changed


class OnlineFit:
    """value = sum of coefficient_i * feature_i, with features and coefficients >= 0.

    One thread observes; `coefficients` is replaced as a whole, so that any thread may predict.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: the coefficients, all > 0, to go by until something was observed."""
        if not all(coefficient > 0 for coefficient in prior):
            raise ValueError(f"prior coefficients must be positive, not {list(prior)}")
        # coefficients are fitted as multiples of their prior, which puts all on one scale
        self._scale = np.array(prior)
        self._information = np.eye(len(prior)) * _PRIOR_WEIGHT
        self._weighted = np.full(len(prior), _PRIOR_WEIGHT)  # information @ unbounded solution
        self._solution = np.ones(len(prior))
        self._free = np.ones(len(prior), dtype=np.bool_)
        self.coefficients = tuple(float(coefficient) for coefficient in prior)

    def predict(self, features: Sequence[float]) -> float:
        """The value for these features."""
        return sum(map(float.__mul__, self.coefficients, map(float, features)))

    def observe(self, features: Sequence[float], value: float, trend: Trend) -> None:
        """Learn from one measurement; `trend` is that of its kind. One that is not positive and
        finite has no relative error and is left out."""
        if not 0 < value < math.inf:
            return
        predicted = self.predict(features)
        believed, changed = trend.judge(predicted, value)
        # by the prediction rather than the value where it can be trusted: dividing by noisy values
        # would favour the low ones
        unit = believed if changed or trend.count <= _FRESH else predicted
        row = np.array(features) * self._scale / unit
        if changed:
            self._weighted *= (believed / predicted) ** _SHARED_CHANGE
        self._forget(row, _FAST_FORGETTING if changed else _FORGETTING)
        self._information += row[:, None] * row
        self._weighted += row * (believed / unit)
        self._solution = self._solve()
        self.coefficients = tuple((np.maximum(self._solution, _FLOOR) * self._scale).tolist())

    def _forget(self, row: _Vector, share: float) -> None:
        """Take away `share` of what is known about this direction, and of nothing else."""
        known = self._information @ row
        amount = float(row @ known)
        if amount <= 0:  # lost to rounding
            return
        factor = share / amount
        weighted = factor * float(row @ self._weighted)
        self._information -= (factor * known)[:, None] * known
        self._weighted -= weighted * known

    def _solve(self) -> _Vector:
        """Non-negative least squares by an active set that is kept from call to call, so that
        mostly one solve is enough."""
        free = self._free
        damping = _DAMPING * self._information.diagonal()
        matrix = self._information + np.diag(damping)
        target = self._weighted + damping * self._solution
        solution = np.zeros(len(free))
        for _ in range(2 * len(free)):
            if free.all():
                solution[:] = np.linalg.solve(matrix, target)
            else:
                solution[~free] = 0.0
                solution[free] = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
            lowest = solution.argmin()
            if solution[lowest] < 0:
                free[lowest] = False
                continue
            if free.all():
                break
            pull = np.where(free, 0.0, target - matrix @ solution)
            strongest = pull.argmax()
            if pull[strongest] <= 1e-9 * abs(target[strongest]):
                break
            free[strongest] = True
        return np.maximum(solution, 0.0)
