"""Who goes where more want to wait than may: one tenant's requests must not take all of the room
from the others of its class."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.slo.line import Waiter

_Place = tuple[int, bytes]
"""A priority and a flow."""


@dataclass(slots=True)
class _Flow:
    """Those of one flow and priority who wait, in the order in which they came, and the length of
    their prompts together."""

    waiters: dict[Waiter, None] = field(default_factory=dict)
    tokens: int = 0


@dataclass(slots=True)
class _Rest:
    """What a flow would have if those before had gone; `last` are its waiters, what is due last at
    the end, once they were asked for."""

    weight: float
    count: int
    tokens: int
    last: list[Waiter] | None = None


class WaitingRoom:
    """All that wait in front of a gateway's models: so many at once, with prompts of so many tokens
    all together. Belongs to the event loop."""

    def __init__(self, most: int, most_tokens: int) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._flows: dict[_Place, _Flow] = {}
        self._count = 0
        self._tokens = 0

    def add(self, waiter: Waiter) -> None:
        """One more; `remove` it on every path."""
        flow = self._flows.setdefault(waiter.place, _Flow())
        flow.waiters[waiter] = None
        flow.tokens += waiter.tokens
        self._count += 1
        self._tokens += waiter.tokens

    def remove(self, waiter: Waiter) -> None:
        """It waits no longer."""
        flow = self._flows[waiter.place]
        del flow.waiters[waiter]
        flow.tokens -= waiter.tokens
        self._count -= 1
        self._tokens -= waiter.tokens
        if not flow.waiters:
            del self._flows[waiter.place]

    def who_goes(self, newcomer: Waiter) -> list[Waiter] | None:
        """Who has to go so that the newcomer may wait too; None if it may not.

        The least urgent go first, and of the same urgency it is the flow with the largest part of
        the room, by its weight, and of that what is due last, or came last. Of the newcomer's own
        urgency a flow gives way only while its part is larger than the newcomer's would be: so
        flows that all want to wait come to have parts that are alike.
        """
        over = self._count + 1 - self._most
        over_tokens = self._tokens + newcomer.tokens - self._most_tokens
        if newcomer.tokens > self._most_tokens:
            return None
        if over <= 0 and over_tokens <= 0:
            return []
        own_flow = self._flows.get(newcomer.place, _Flow())
        own_tokens = own_flow.tokens + newcomer.tokens
        own = self._part(_Rest(newcomer.weight, len(own_flow.waiters) + 1, own_tokens))
        rests = {
            place: _Rest(next(reversed(flow.waiters)).weight, len(flow.waiters), flow.tokens)
            for place, flow in self._flows.items()
            if place[0] >= newcomer.priority and place != newcomer.place
        }
        leaving: list[Waiter] = []
        while over > 0 or over_tokens > 0:
            if not rests:
                return None
            place = max(rests, key=lambda each: (each[0], self._part(rests[each])))
            rest = rests[place]
            if place[0] == newcomer.priority and self._part(rest) <= own:
                return None
            if rest.last is None:
                rest.last = sorted(self._flows[place].waiters, key=_due_s)
            last = rest.last.pop()
            leaving.append(last)
            rest.count -= 1
            rest.tokens -= last.tokens
            if not rest.count:
                del rests[place]
            over, over_tokens = over - 1, over_tokens - last.tokens
        return leaving

    def _part(self, rest: _Rest) -> float:
        return max(rest.count / self._most, rest.tokens / self._most_tokens) / rest.weight


def _due_s(waiter: Waiter) -> float:
    return waiter.due_s
