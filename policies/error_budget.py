"""What follows from how a tenant's promise was kept: how fast its error budget burns, and what its
requests weigh because of that.

A promise is kept by a share of the requests; the others are its budget of errors. A burn rate of 1
spends the budget in exactly the time that it is for; see the SRE Workbook, "Alerting on SLOs".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MOST, LEAST = 2.0, 0.8
"""Between these a tenant's weight is multiplied."""
_STEP = 1.1
"""By so much it changes at a time: a weight that jumps makes queues swing."""
_ENOUGH = 20
"""Answers within the long window. Fewer than that tell nothing."""
_ENOUGH_LATELY = 5
_BEGINS, _ENDS = 1.0, 0.9
"""Burning: begins above the first, ends below the second, so that a tenant does not go to and fro
between the two."""
_UNTOUCHED, _TOUCHED = 0.25, 0.5
"""The same of having a budget that others may have some of."""


def burn_rate(met: int, promised: int, target: float) -> float:
    """How many times as fast as it may, a budget is being spent; 0 where nothing was promised."""
    if not promised:
        return 0.0
    return (1.0 - met / promised) / (1.0 - target)


@dataclass(frozen=True, slots=True)
class Burn:
    """One tenant's: its burn rates over a short and a long window, with the answers in each that
    something was promised for."""

    short: float
    long: float
    short_answers: int
    long_answers: int

    @property
    def rate(self) -> float:
        """Burning now and for some time: the lesser of both. 0 where too little is known."""
        if self.long_answers < _ENOUGH or self.short_answers < _ENOUGH_LATELY:
            return 0.0
        return min(self.short, self.long)


class ClassExcess(NamedTuple):
    """Of the tenants of one class: how many, and the sums of their burn rates beyond both bounds of
    burning."""

    tenants: int
    beyond_begin: float
    beyond_end: float


def class_excess(burns: Iterable[Burn]) -> ClassExcess:
    """Over all of these."""
    rates = [burn.rate for burn in burns]
    return ClassExcess(
        len(rates),
        sum(max(0.0, rate - _BEGINS) for rate in rates),
        sum(max(0.0, rate - _ENDS) for rate in rates),
    )


def next_factor(before: float, own: Burn, whole: ClassExcess) -> float:
    """What a tenant's weight is multiplied by from now on, where it was `before` up to now; `whole`
    are the tenants of its class, itself among them.

    It tends to `(1 + e) / (1 + mean)`, `e` being the burn beyond what is allowed and the mean that
    of the class: so it is 1 where all burn alike, above 1 only for who burns too fast, and below 1
    only for who has hardly touched its budget while others burn.
    """
    burning = before > 1.0
    excess = max(0.0, own.rate - (_ENDS if burning else _BEGINS))
    mean = (whole.beyond_end if burning else whole.beyond_begin) / max(1, whole.tenants)
    wanted = (1.0 + excess) / (1.0 + mean)
    if excess:
        wanted = max(1.0, wanted)
    elif own.rate <= (_TOUCHED if before < 1.0 else _UNTOUCHED):
        wanted = max(LEAST, wanted)
    else:
        wanted = 1.0
    return min(MOST, before * _STEP, max(before / _STEP, wanted))
