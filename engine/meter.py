"""What sequences owe for the work done for them, and what classes were served."""

from __future__ import annotations

from collections import defaultdict

from engine.sequence import Sequence
from policies.fairness import GENERATED_UNITS, TokenCounters
from policies.floors import Served


class Meter:
    """Charges flows, in the terms of `policies.fairness`. Step-loop thread only.

    A sequence is paid for in the class that it began in, whatever it is urged to later.
    """

    def __init__(self) -> None:
        self._counters: dict[int, TokenCounters] = {}
        self._served: defaultdict[int, int] = defaultdict(int)
        self._in_turns: dict[int, float] = {}

    def counters(self, priority: int) -> TokenCounters:
        """Those of the flows of one class."""
        counters = self._counters.get(priority)
        if counters is None:
            counters = self._counters[priority] = TokenCounters()
        return counters

    def tag(self, sequence: Sequence) -> float:
        """The virtual time at which the sequence's prompt is computed, if it begins next of its
        flow: the place that it has among the prompts of its class which are under way."""
        if sequence.tag is not None:
            return sequence.tag
        request = sequence.request
        count = self.counters(sequence.rank.priority).count(request.flow)
        return count + sequence.uncached / request.weight

    def begin(self, sequence: Sequence, found_tokens: int) -> None:
        """The sequence is let in and starts behind `found_tokens`: it pays for the others, and for
        the answer that is expected."""
        request = sequence.request
        counters = sequence.counters = self.counters(sequence.rank.priority)
        computes = max(0, sequence.known - max(found_tokens, sequence.charged))
        if sequence.tag is None:
            counters.begin(request.flow)
            sequence.tag = counters.count(request.flow) + computes / request.weight
        answer = counters.expected_answer_tokens(request.flow, request.params.max_tokens)
        generates = max(1.0, answer - sequence.generated)
        sequence.prepaid = computes + GENERATED_UNITS * generates
        counters.charge(request.flow, sequence.prepaid, request.weight)

    def serve(self, sequence: Sequence, end: int, *, generates: bool) -> None:
        """Its tokens from `computed` to `end` are computed, and one more is generated or not. What
        had been computed before a preemption costs nothing again."""
        units = 1 if generates else 0
        before = max(sequence.charged, sequence.computed)
        if end > before:
            units += end - before
            sequence.charged = end
        priority = sequence.rank[0]
        self._served[priority] += units
        if sequence.turn:
            in_turn = min(sequence.turn, units)
            sequence.turn -= in_turn
            self._in_turns[priority] = self._in_turns.get(priority, 0.0) + in_turn
        sequence.prepaid -= units
        if sequence.prepaid < 0:
            self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Settle what it has paid for and not got, as when it runs no longer, or got and not paid
        for."""
        if sequence.counters is not None:
            request = sequence.request
            sequence.counters.charge(request.flow, -sequence.prepaid, request.weight)
            sequence.prepaid = 0.0

    def end(self, sequence: Sequence) -> None:
        """It does not come back: its answer says how long the next ones will be."""
        if sequence.counters is not None and sequence.generated:
            sequence.counters.learn_answer(sequence.request.flow, sequence.generated)

    def moved(self, sequence: Sequence) -> None:
        """The sequence's class is another now, where nobody's prompt comes before its own."""
        if sequence.tag is not None:
            sequence.tag = self.counters(sequence.rank.priority).time

    def take_served(self) -> Served:
        """What each priority was served since the last time."""
        served = Served(self._served, self._in_turns)
        self._served, self._in_turns = defaultdict(int), {}
        return served
