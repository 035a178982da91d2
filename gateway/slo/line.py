"""Requests that wait in front of one model for a better moment, and in which order they go on."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic

from gateway.dispatch.member import Routable
from gateway.dispatch.router import Router
from policies.admission import Ruling, Verdict

_LEAST_PAUSE_S = 0.002
"""Between two looks: what happens in one step of an engine is looked at together."""
_LONGEST_PAUSE_S = 0.25
"""What only time changes is noticed so late at most."""
_HEADS_PER_LOOK = 16
"""Judging one costs as much as routing it. Where more flows wait, half of a look is for those whose
turn it is, and the rest for the others one after another: what keeps the first ones back, such as
work of their own at the replicas, need not keep back who is behind them."""

_Place = tuple[int, bytes]
"""A priority and a flow."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One request. `judge` says what would become of it now, `tokens` is the length of its prompt;
    within its flow the earliest `due_s` is first, then the one that came first. `ruling` is what
    was found the last time."""

    priority: int
    flow: bytes
    weight: float
    due_s: float
    tokens: int
    judge: Callable[[], Ruling]
    ruling: Ruling
    turn: asyncio.Future[None] = field(init=False)

    def __post_init__(self) -> None:
        self.turn = asyncio.get_running_loop().create_future()

    @property
    def place(self) -> _Place:
        """Where it waits."""
        return self.priority, self.flow


class Line:
    """Belongs to the event loop. Looks at who waits when something has changed at the replicas, and
    watches them only while somebody does.

    Order: class; within one, flows by how many prompt tokens were let through for them, each by its
    weight (one that comes back has no more in hand than who waits already); within a flow, by what
    is due first. One is let through at a time: what it adds to the load decides on the next.
    """

    def __init__(self, router: Router[Routable]) -> None:
        self._router = router
        self._waiters: dict[_Place, list[Waiter]] = {}
        self._served: dict[_Place, float] = {}
        self._watch = ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._looked_s = 0.0
        self._looked_behind = 0

    def __len__(self) -> int:
        return sum(len(line) for line in list(self._waiters.values()))

    def add(self, waiter: Waiter) -> None:
        """One more; `remove` it on every path."""
        if not self._waiters:
            self._watch.enter_context(self._router.watched(self.changed))
        line = self._waiters.get(waiter.place)
        if line is None:
            rivals = [self._served[each] for each in self._waiters if each[0] == waiter.priority]
            before = self._served.get(waiter.place, 0.0)
            self._served[waiter.place] = max(before, min(rivals, default=before))
            line = self._waiters[waiter.place] = []
        insort(line, waiter, key=_due_s)
        self._look_in(_LONGEST_PAUSE_S)

    def remove(self, waiter: Waiter) -> None:
        """It has gone on, or away; who is behind it is looked at."""
        line = self._waiters[waiter.place]
        line.remove(waiter)
        if not line:
            del self._waiters[waiter.place]
        if self._waiters:
            self.changed()
            return
        self._served.clear()
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def changed(self) -> None:
        """A request may fare otherwise than before: look again soon."""
        self._look_in(max(0.0, self._looked_s + _LEAST_PAUSE_S - monotonic()))

    def _look_in(self, seconds: float) -> None:
        at_s = monotonic() + seconds
        if self._timer is not None:
            if self._timer_s <= at_s:
                return
            self._timer.cancel()
        self._timer_s = at_s
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        self._looked_s = monotonic()
        self._look_in(_LONGEST_PAUSE_S)
        for place in self._heads():
            head = next((each for each in self._waiters[place] if not each.turn.done()), None)
            if head is None:
                continue
            head.ruling = head.judge()
            if head.ruling.verdict is Verdict.QUEUE:
                continue
            head.turn.set_result(None)
            if head.ruling.verdict is Verdict.ADMIT:
                self._served[place] += head.tokens / head.weight
                break

    def _heads(self) -> list[_Place]:
        """Where it is to be looked this time, in order."""
        order = sorted(self._waiters, key=lambda place: (place[0], self._served[place]))
        if len(order) <= _HEADS_PER_LOOK:
            return order
        first = _HEADS_PER_LOOK // 2
        behind = order[first:]
        at = self._looked_behind % len(behind)
        self._looked_behind = at + _HEADS_PER_LOOK - first
        return order[:first] + (behind[at:] + behind[:at])[: _HEADS_PER_LOOK - first]


def _due_s(waiter: Waiter) -> float:
    return waiter.due_s
