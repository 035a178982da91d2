"""By how much predictions have lately been off, all in the same direction."""

from __future__ import annotations

import math

_FLOOR_S = 0.02
"""Added to both sides of the comparison: what a prediction of a few milliseconds misses is mostly
the same few for all."""
_SHARE = 0.1
"""Of the newest observation in the running mean."""
_LEAST, _MOST = 0.5, 4.0
_HALF_LIFE_S = 30.0
"""Of what was learned, while nothing new is: who is thought to be late is sent nothing any more,
and could not show otherwise."""


class PredictionBias:
    """Of one flow at one replica, say. The mean is one of logarithms, so that twice and half are as
    far off; it tends to 1 as time passes, and stays between 0.5 and 4. Times are seconds of one
    clock."""

    __slots__ = ("_at_s", "_log")

    def __init__(self, factor: float = 1.0, now_s: float = 0.0) -> None:
        """`factor` is what is thought before anything was seen."""
        self._log = math.log(factor)
        self._at_s = now_s

    def factor(self, now_s: float) -> float:
        """What a prediction is to be multiplied by."""
        return math.exp(self._faded(now_s))

    def observe(self, predicted_s: float, actual_s: float, now_s: float) -> None:
        """Something took `actual_s` that was predicted, without any correction, to take
        `predicted_s`."""
        seen = math.log((max(0.0, actual_s) + _FLOOR_S) / (max(0.0, predicted_s) + _FLOOR_S))
        before = self._faded(now_s)
        mean = before + _SHARE * (seen - before)
        self._log = min(math.log(_MOST), max(math.log(_LEAST), mean))
        self._at_s = now_s

    def _faded(self, now_s: float) -> float:
        return self._log * math.exp2(min(0.0, (self._at_s - now_s) / _HALF_LIFE_S))
