"""Whether a server keeps up with what it is sent, or falls ever further behind."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from loadtest.columns import Columns

_TOLERATED = 0.1
_DEVIATIONS = 2.0
_SHORTEST_IN_ANSWERS = 4


class Backlog(NamedTuple):
    """The second half of the time in which requests were sent: so many were `sent` in it, and so
    many were open, sent and not ended, at its beginning and at its end."""

    sent: int
    open_before: int
    open_after: int

    @classmethod
    def of(cls, columns: Columns) -> Backlog | None:
        """None if the run says nothing: when it was shorter than a few answers, what is open still
        grows with the first of them, and not because the server falls behind."""
        if len(columns) < 2:
            return None
        sent_s, ended_s = np.sort(columns.sent_s), np.sort(columns.ended_s)
        first_s, last_s = float(sent_s[0]), float(sent_s[-1])
        early = columns.sent_s <= first_s + (last_s - first_s) / 4
        answer_s = float(np.median(columns.e2e_s[early]))
        if last_s - first_s < _SHORTEST_IN_ANSWERS * answer_s:
            return None
        middle_s = (first_s + last_s) / 2
        sent = [int(np.searchsorted(sent_s, at_s, "right")) for at_s in (middle_s, last_s)]
        ended = [int(np.searchsorted(ended_s, at_s, "right")) for at_s in (middle_s, last_s)]
        return cls(sent[1] - sent[0], sent[0] - ended[0], sent[1] - ended[1])


def falls_behind(backlogs: Iterable[Backlog]) -> bool:
    """Whether, over all of these together, fewer than nine in ten of what was sent had ended when
    its like was: what is open has grown by over a tenth of what was sent.

    How many are open varies by itself, at random arrivals about as a Poisson count does. So growth
    within two deviations of the difference between two such counts, each as large as the one
    before any growth, and one, is none.
    """
    sent = grown = varies = 0
    for one in backlogs:
        sent += one.sent
        grown += one.open_after - one.open_before
        varies += 2 * (one.open_before + 1)
    return grown > _TOLERATED * sent + _DEVIATIONS * math.sqrt(varies)
