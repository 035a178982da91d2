"""Of very many equal replicas, the few that can be chosen.

A policy (`routing_policies`) looks at every candidate, which takes about a millisecond for a
thousand. Where all replicas have equal coefficients, what a request would cost at each of them can
be said beforehand up to a few numbers of the request: so they are kept by replica, brought up to
date when its standing changes, and compared all at once. Only the best few are shown to the policy,
which decides among them as always.

What is lost. *Predicted TTFT*: nothing of the cost. The one that costs least is always on the list,
as its cost is worked out by the same code (`predicted_terms`) and is exact where nothing is queued
but by one flow of one priority; elsewhere all that is queued counts as in front. What differs is
chance: of those that are equal within the policy's noise, the ones that cost least are shown, and
so chosen. *Prefix affinity*: nothing. *Least loaded* and *at random*: nothing, chance makes the
list. *Round robin*: those who were shown longest ago come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from policies.cost import Coefficients
from policies.routing import NOTHING_CACHED, Cached, Candidate, RouteRequest, Standing
from policies.routing_prediction import predicted_terms

_Floats = NDArray[np.float64]

_IDLE = Standing()


class Holders(NamedTuple):
    """Replicas, by number, that have the same of a prompt."""

    replicas: NDArray[np.intp]
    cached: Cached


class Shortlist(Protocol):
    """Of replicas that are numbered from 0. The numbers on a list are distinct and in order."""

    def note(self, replica: int, standing: Standing) -> None:
        """This is known of it from now on."""

    def likely(
        self, request: RouteRequest, warm: Sequence[Holders], random: Random
    ) -> Sequence[int]:
        """Those to be shown to the policy, at least one. `warm` says who has something of the
        prompt, each replica once; the others have nothing."""
        ...


class _Parts(NamedTuple):
    """Of a prompt of which a certain beginning is cached: the tokens to compute, and what computing
    them takes apart from the steps' own constants; what loading takes before that."""

    tokens: int
    rows_s: float
    load_s: float


class TtftShortlist:
    """For `PredictedTtft`. Of those that are in time for the request's promise, the ones that cost
    least are on the list as well."""

    def __init__(self, cost: Coefficients, replicas: int, most: int, *, noise: float = 0.1) -> None:
        """`most` replicas are listed, up to twice as many where something was promised; `noise` is
        the policy's."""
        self._cost = cost
        self._most = most
        self._noise = noise
        self._work = _Work(cost, replicas)
        # of the request that is asked about, by replica; made once, as there are many requests
        self._tokens, self._rows_s, self._load_s = np.zeros((3, replicas))

    def note(self, replica: int, standing: Standing) -> None:
        """See `Shortlist.note`."""
        self._work.note(replica, standing)

    def likely(
        self,
        request: RouteRequest,
        warm: Sequence[Holders],
        random: Random,
    ) -> Sequence[int]:
        """The least cost."""
        work = self._work
        work.renew(request)
        cold = _parts(self._cost, request.prompt_tokens, NOTHING_CACHED)
        tokens: _Floats | float = float(cold.tokens)
        rows_s: _Floats | float = cold.rows_s
        load_s: _Floats | float = 0.0
        if warm:
            tokens, rows_s, load_s = self._tokens, self._rows_s, self._load_s
            tokens.fill(cold.tokens)
            rows_s.fill(cold.rows_s)
            load_s.fill(0.0)
            for holders, cached in warm:
                parts = _parts(self._cost, request.prompt_tokens, cached)
                tokens[holders] = parts.tokens
                rows_s[holders] = parts.rows_s
                load_s[holders] = parts.load_s
        prefill_s = rows_s + np.ceil(tokens / work.room) * work.step_s
        own_s = prefill_s * work.turns + load_s
        costs_s = work.queue_s + own_s
        first = int(costs_s.argmin())
        bound_s = costs_s[first] + self._noise * own_s[first]
        listed = self._some(costs_s, bound_s, first, random)
        if request.due_s is not None:
            ttft_s = work.queue_s + load_s + prefill_s
            if ttft_s[listed].max() <= request.due_s:
                return listed
            in_time = np.where(ttft_s <= request.due_s, costs_s, np.inf)
            first = int(in_time.argmin())
            if in_time[first] < np.inf:
                bound_s = in_time[first] + self._noise * own_s[first]
                listed = sorted({*listed, *self._some(in_time, bound_s, first, random)})
        return listed

    def _some(self, costs_s: _Floats, bound_s: float, first: int, random: Random) -> list[int]:
        """The `first`, which costs least, and others within the bound by chance; if they are few,
        others yet."""
        if self._most >= len(costs_s):
            return list(range(len(costs_s)))
        equal = (costs_s <= bound_s).nonzero()[0]
        if len(equal) < self._most:
            return _least(costs_s, self._most)
        chosen = random.sample(range(len(equal)), self._most - 1)
        return sorted({first, *equal[chosen].tolist()})


class AffinityShortlist:
    """For `PrefixAffinity`."""

    def __init__(self, cost: Coefficients, replicas: int, most: int) -> None:
        self._most = most
        self._work = _Work(cost, replicas)

    def note(self, replica: int, standing: Standing) -> None:
        """See `Shortlist.note`."""
        self._work.note(replica, standing)

    def likely(
        self,
        request: RouteRequest,
        warm: Sequence[Holders],
        random: Random,  # noqa: ARG002 - every shortlist is asked alike
    ) -> Sequence[int]:
        """Of those that have most of the prompt, the least queues."""
        self._work.renew(request)
        queue_s = self._work.queue_s
        longest = max((each.cached.tokens for each in warm), default=0)
        warmest = [each.replicas for each in warm if each.cached.tokens == longest]
        if not warmest:
            return _least(queue_s, self._most)
        found = np.sort(np.concatenate(warmest))
        return [int(found[each]) for each in _least(queue_s[found], self._most)]


class LoadShortlist:
    """For `LeastLoaded`."""

    def __init__(self, replicas: int, most: int) -> None:
        self._most = most
        self._sequences = np.zeros(replicas)

    def note(self, replica: int, standing: Standing) -> None:
        """See `Shortlist.note`."""
        sequences = np.inf if standing.full else standing.waiting + standing.running
        self._sequences[replica] = sequences

    def likely(
        self,
        request: RouteRequest,  # noqa: ARG002 - every shortlist is asked alike
        warm: Sequence[Holders],  # noqa: ARG002
        random: Random,
    ) -> Sequence[int]:
        """The fewest sequences."""
        sequences = self._sequences
        least: list[int] = np.flatnonzero(sequences == sequences.min()).tolist()
        return sorted(random.sample(least, self._most)) if len(least) > self._most else least


class RandomShortlist:
    """For `AtRandom`."""

    def __init__(self, replicas: int, most: int) -> None:
        self._replicas = range(replicas)
        self._most = most
        self._full: set[int] = set()

    def note(self, replica: int, standing: Standing) -> None:
        """See `Shortlist.note`."""
        _note_full(self._full, replica, standing)

    def likely(
        self,
        request: RouteRequest,  # noqa: ARG002 - every shortlist is asked alike
        warm: Sequence[Holders],  # noqa: ARG002
        random: Random,
    ) -> Sequence[int]:
        """Any."""
        usable: Sequence[int] = self._replicas
        if 0 < len(self._full) < len(self._replicas):
            usable = [each for each in self._replicas if each not in self._full]
        return sorted(random.sample(usable, min(self._most, len(usable))))


class TurnShortlist:
    """For `RoundRobin`: one at a time, in an order that chance makes once."""

    def __init__(self, replicas: int) -> None:
        self._order = list(range(replicas))
        self._turn = -1
        self._full: set[int] = set()

    def note(self, replica: int, standing: Standing) -> None:
        """See `Shortlist.note`."""
        _note_full(self._full, replica, standing)

    def likely(
        self,
        request: RouteRequest,  # noqa: ARG002 - every shortlist is asked alike
        warm: Sequence[Holders],  # noqa: ARG002
        random: Random,
    ) -> Sequence[int]:
        """Whose turn it is."""
        order = self._order
        if self._turn < 0:
            random.shuffle(order)
        for _ in order:
            self._turn = (self._turn + 1) % len(order)
            if order[self._turn] not in self._full:
                break
        return (order[self._turn],)


class _Work:
    """What a newcomer finds at each replica, as numbers that do not depend on its prompt: the
    queue, a step's own constant, how often what is computed for it counts, and the tokens that a
    step has for it. How long answers are expected to be is, where no replica knows, as the request
    has it that was routed when the replica's standing had changed."""

    def __init__(self, cost: Coefficients, replicas: int) -> None:
        self.queue_s = np.zeros(replicas)
        self.step_s = np.zeros(replicas)
        self.turns = np.zeros(replicas)
        self.room = np.ones(replicas)
        self._cost = cost
        self._standings = [_IDLE] * replicas
        self._outdated = set(range(replicas))
        self._one_token_s = cost.prefill_s(1, 0) - cost.constant_s - cost.sequence_s

    def note(self, replica: int, standing: Standing) -> None:
        self._standings[replica] = standing
        self._outdated.add(replica)

    def renew(self, request: RouteRequest) -> None:
        """Take in what has changed."""
        if not self._outdated:
            return
        changed = sorted(self._outdated)
        self._outdated.clear()
        standings = [self._standings[each] for each in changed]
        candidates = [
            Candidate("", self._cost, each._replace(queued=(), yielding=()), NOTHING_CACHED)
            if each.queued or each.yielding
            else Candidate("", self._cost, each, NOTHING_CACHED)
            for each in standings
        ]
        terms = predicted_terms(RouteRequest(1, request.max_tokens), candidates)
        step_tokens = self._cost.step_tokens
        for replica, standing, (queue_s, _, prefill_s) in zip(
            changed, standings, terms, strict=True
        ):
            reuse = standing.reuse
            self.queue_s[replica] = np.inf if standing.full else queue_s
            self.step_s[replica] = prefill_s - self._one_token_s
            self.turns[replica] = 1.0 + standing.waiting + reuse + reuse * reuse
            self.room[replica] = max(1, step_tokens - standing.running)


def _parts(cost: Coefficients, prompt_tokens: int, cached: Cached) -> _Parts:
    """Loading what makes it least, alone, as `predict` has it."""
    device, dram, redis = cached
    loads = [(0, 0)]
    if dram:
        loads.append((dram, 0))
    if redis:
        loads.append((dram, redis))
    best_s, best = np.inf, None
    for from_dram, from_redis in loads:
        tokens = max(1, prompt_tokens - device - from_dram - from_redis)
        load_s = cost.load_s(from_dram, from_redis)
        alone_s = cost.prefill_s(tokens, prompt_tokens - tokens)
        if load_s + alone_s < best_s:
            best_s = load_s + alone_s
            steps = (tokens - 1) // cost.step_tokens + 1
            rows_s = alone_s - steps * (cost.constant_s + cost.sequence_s)
            best = _Parts(tokens, rows_s, load_s)
    assert best is not None
    return best


def _least(costs_s: _Floats, most: int) -> list[int]:
    """The places of the least of them, in order."""
    if most >= len(costs_s):
        return list(range(len(costs_s)))
    least: list[int] = np.argpartition(costs_s, most - 1)[:most].tolist()
    least.sort()
    return least


def _note_full(full: set[int], replica: int, standing: Standing) -> None:
    if standing.full:
        full.add(replica)
    else:
        full.discard(replica)


SHORTLISTS: dict[str, Callable[[Coefficients, int, int], Shortlist]] = {
    "predicted-ttft": TtftShortlist,
    "prefix-affinity": AffinityShortlist,
    "least-loaded": lambda _, replicas, most: LoadShortlist(replicas, most),
    "round-robin": lambda _, replicas, __: TurnShortlist(replicas),
    "random": lambda _, replicas, most: RandomShortlist(replicas, most),
}
"""What makes the shortlist for each of `routing_policies.BUILT_IN`, of so many replicas with these
coefficients, and how many to list at most."""
