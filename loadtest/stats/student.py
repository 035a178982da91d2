"""Student's t distribution, for means of few values.

("Student", "The Probable Error of a Mean", Biometrika 6, 1908; the closed forms are 26.7.3 and
26.7.4 of Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964.)
"""

from __future__ import annotations

import math
from functools import lru_cache

_HALVINGS = 80


def within(t: float, degrees: int) -> float:
    """The probability that a value lies between -t and t, for t from 0 and `degrees` of freedom
    from 1. Raises ValueError outside."""
    if not t >= 0 or degrees < 1:
        raise ValueError(f"t is at least 0 and has a degree of freedom, not {t:g} with {degrees}")
    if math.isinf(t):
        return 1.0
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    squared = math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if degrees == 1 else term
    # The sum has terms of cos^1, cos^3, … for odd and cos^0, cos^2, … for even degrees, the last
    # of cos^(degrees - 2); each has one factor more than the one before.
    for power in range(2 + odd, degrees - 1, 2):
        term *= squared * (power - 1) / power
        total += term
    inner = math.sin(angle) * total
    return (2 / math.pi) * (angle + inner) if odd else inner


def two_sided_p(t: float, degrees: int) -> float:
    """The probability of a value as far from 0 as `t`, on either side, if there is nothing to
    find. Raises ValueError without a degree of freedom."""
    return max(1.0 - within(abs(t), degrees), 0.0)


@lru_cache
def quantile(confidence: float, degrees: int) -> float:
    """The t between whose negative and which a value lies with probability `confidence`. Raises
    ValueError for a confidence outside 0 to 1 or no degree of freedom."""
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence:g}")
    low, high = 0.0, 1.0
    while within(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return high
