"""What work takes on a server that tells nothing of its steps, learned from its answers' times.

    time to first token = constant + token_s * (uncached + pending tokens)
    time per token after it = constant + sequence_s * running

Both lines are followed by recursive least squares on the relative error, with forgetting, each
coefficient kept positive. One surprise moves them little, surprises in a row are believed.
"""

from __future__ import annotations

import math

from policies.cost import Coefficients

_PRIOR_FIRST_TOKEN = (0.03, 1e-4)
"""Seconds and seconds per prompt token: a modest GPU with a model of some billion weights."""
_PRIOR_NEXT_TOKEN = (0.02, 5e-4)
"""Seconds and seconds per running sequence."""
_STEP_TOKENS = 8192
_PRIOR_WEIGHT = 0.01
_LEAST_KNOWN = 1e-6
"""Of what is known of both coefficients, as a share: rounding must not make it nothing."""
_KEEP = 0.98
_KEEP_AFTER_CHANGE = 0.5
_FLOOR = 1e-3
"""No coefficient falls below this share of its prior."""
_CLIP = 3.0
_IN_A_ROW = 4
_SHORTEST_S, _LONGEST_S = 1e-6, 3600.0


class Line:
    """y = intercept + slope * x, both positive, learned as observations come.

    Recursive least squares that forgets only in the direction of what it observes (L. Cao and
    H. Schwartz, "A directional forgetting algorithm based on the decomposition of the information
    matrix", Automatica 36, 2000): thousands of prompts of which a few tokens are new say what the
    intercept is, and nothing of what a long one would take, which is remembered meanwhile.
    """

    __slots__ = ("_intercept", "_prior", "_run", "_slope", "_w", "_wx", "_wxx")

    def __init__(self, intercept: float, slope: float) -> None:
        """What to go by until something was observed; both > 0."""
        if not (intercept > 0 and slope > 0):
            raise ValueError("a line's prior must be positive")
        self._prior = (intercept, slope)
        # in units of the prior's coefficients: x = 1 is where both terms are equal
        self._intercept = self._slope = 1.0
        # the information: weights, and these times x and x * x
        self._w = self._wxx = _PRIOR_WEIGHT
        self._wx = 0.0
        self._run = 0

    @property
    def intercept(self) -> float:
        """y at 0."""
        return self._intercept * self._prior[0]

    @property
    def slope(self) -> float:
        """By how much y grows with x."""
        return self._slope * self._prior[1]

    def predict(self, x: float) -> float:
        """y at x."""
        return self.intercept + self.slope * x

    def observe(self, x: float, y: float) -> None:
        """Learn from one observation; one that no server can have shown is left out."""
        if not (0 <= x < math.inf and _SHORTEST_S <= y <= _LONGEST_S):
            return
        predicted = self.predict(x)
        believed = self._believe(predicted, y)
        scale, slope_scale = self._prior
        weight = (scale / believed) ** 2  # errors count relative to what was seen
        at = x * slope_scale / scale
        forget = 1 - (_KEEP_AFTER_CHANGE if abs(self._run) >= _IN_A_ROW else _KEEP)
        # how much is known in the direction (1, at), of which a part is forgotten
        known, known_x = self._w + self._wx * at, self._wx + self._wxx * at
        share = forget / (known + known_x * at)
        self._w += weight - share * known * known
        self._wx += weight * at - share * known * known_x
        self._wxx += weight * at * at - share * known_x * known_x
        self._move(at, weight * (believed - predicted) / scale)

    def _believe(self, predicted: float, y: float) -> float:
        """The value to learn from: a single surprise is bounded, the same surprise again and again
        is a change."""
        ratio = y / predicted
        if 1 / _CLIP <= ratio <= _CLIP:
            self._run = 0
            return y
        direction = 1 if ratio > 1 else -1
        self._run = self._run + direction if self._run * direction > 0 else direction
        if abs(self._run) >= _IN_A_ROW:
            return y
        return predicted * (_CLIP if direction > 0 else 1 / _CLIP)

    def _move(self, at: float, error: float) -> None:
        """By a weighted error at a place; a coefficient that would get too small stops there, and
        the other makes up for it."""
        w, wx, wxx = self._w, self._wx, self._wxx
        determinant = max(w * wxx - wx * wx, _LEAST_KNOWN * w * wxx)
        intercept = self._intercept + error * (wxx - wx * at) / determinant
        slope = self._slope + error * (w * at - wx) / determinant
        if intercept < _FLOOR:
            slope += wx * (intercept - _FLOOR) / wxx
            intercept = _FLOOR
        if slope < _FLOOR:
            intercept = max(_FLOOR, intercept + wx * (slope - _FLOOR) / w)
            slope = _FLOOR
        self._intercept, self._slope = intercept, slope


class RemoteCost:
    """One remote replica's cost, as its answers show it."""

    def __init__(self) -> None:
        self._first_token = Line(*_PRIOR_FIRST_TOKEN)
        self._next_token = Line(*_PRIOR_NEXT_TOKEN)
        self._coefficients: Coefficients | None = None

    def coefficients(self) -> Coefficients:
        """As of the last observation; the same object until the next."""
        if self._coefficients is None:
            self._coefficients = self._as_coefficients()
        return self._coefficients

    def observe_first_token(
        self, uncached_tokens: int, pending_tokens: int, seconds: float
    ) -> None:
        """A first token came `seconds` after its request was sent; of its prompt `uncached_tokens`
        had to be computed, behind `pending_tokens` of others."""
        self._first_token.observe(max(0, uncached_tokens) + max(0, pending_tokens), seconds)
        self._coefficients = None

    def observe_next_tokens(self, running: int, seconds: float) -> None:
        """Beside `running` sequences, itself among them, one got a token every `seconds`."""
        self._next_token.observe(max(1, running), seconds)
        self._coefficients = None

    def _as_coefficients(self) -> Coefficients:
        return Coefficients(
            constant_s=self._first_token.intercept,
            token_s=self._first_token.slope,
            sequence_s=self._next_token.slope,
            attended_s=0.0,
            context_read_s=0.0,
            dram_latency_s=0.0,
            dram_block_s=0.0,
            redis_latency_s=0.0,
            redis_block_s=0.0,
            step_tokens=_STEP_TOKENS,
            block_tokens=16,
        )
