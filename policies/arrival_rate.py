"""How much each flow has brought lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import exp
from typing import NamedTuple

_WINDOW_S = 10.0
_REMEMBERED = 256
"""So many flows' rates are known at most, those that brought something last."""


class _Brought(NamedTuple):
    """What is left at this time of all that a flow has brought: long ago counts less."""

    amount: float
    at_s: float


class ArrivalRates:
    """A mean for each flow over about the last 10 seconds, in which what came later weighs more."""

    __slots__ = ("_brought",)

    def __init__(self) -> None:
        self._brought: OrderedDict[Hashable, _Brought] = OrderedDict()

    def __len__(self) -> int:
        """Flows whose rate is known."""
        return len(self._brought)

    def per_s(self, flow: Hashable, more: float, now_s: float) -> float:
        """What the flow has brought in a second, with `more` that it brings now, if that is not 0.
        The clock is any that does not go back."""
        before = self._brought.get(flow)
        left = 0.0
        if before is not None:
            left = before.amount * exp((before.at_s - now_s) / _WINDOW_S)
        if more:
            left += more
            self._brought[flow] = _Brought(left, now_s)
            self._brought.move_to_end(flow)
            if len(self._brought) > _REMEMBERED:
                self._brought.popitem(last=False)
        return left / _WINDOW_S
