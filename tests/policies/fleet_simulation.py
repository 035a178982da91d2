"""A fleet of replicas in simulated time: what a routing policy leads to, without an engine.

A replica steps as the engine does: its running sequences decode, what is left of the step's tokens
prefills, in order of arrival; a step takes what `Coefficients` say. It holds whole prefixes, the
least recently used goes first; whoever needs one that is being computed waits for it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from statistics import quantiles

from policies.cost import Coefficients, StepShape
from policies.routing import Cached, Candidate, RouteRequest, RoutingPolicy, Standing

BUNDLED = Coefficients(
    constant_s=5e-3,
    token_s=225e-6,
    sequence_s=300e-6,
    attended_s=0.0,
    context_read_s=0.0,
    dram_latency_s=50e-6,
    dram_block_s=70e-6,
    redis_latency_s=1e-3,
    redis_block_s=400e-6,
    step_tokens=256,
    block_tokens=16,
)
"""About the bundled model on two cores."""


@dataclass(slots=True)
class Visit:
    """One request on its way through a replica."""

    arrival_s: float
    prefix: int
    prefix_tokens: int
    tail_tokens: int
    answer_tokens: int
    replica: int = -1
    cached_tokens: int = 0
    uncached_tokens: int = 0
    generated: int = 0
    first_s: float = 0.0
    done_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s


@dataclass(slots=True)
class SimulatedReplica:
    """`prefixes`: how many it holds."""

    name: str
    cost: Coefficients
    prefixes: int
    slots: int = 16
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: list[Visit] = field(default_factory=list)
    running: list[Visit] = field(default_factory=list)
    stepping: list[tuple[Visit, int]] = field(default_factory=list)
    busy: bool = False

    def has(self, prefix: int) -> bool:
        """Whether a newcomer will find the prefix there, when its turn comes."""
        return prefix in self.held or any(
            visit.prefix == prefix
            for visit in (*self.running, *self.waiting)
            if not visit.generated
        )

    def candidate(self, visit: Visit) -> Candidate:
        here = (*self.waiting, *self.running)
        decoding = [other for other in self.running if other.generated]
        counted = set(self.held)
        pending = 0
        for other in here:
            if other in self.running:
                pending += other.uncached_tokens
            else:
                pending += other.tail_tokens
                pending += 0 if other.prefix in counted else other.prefix_tokens
            counted.add(other.prefix)
        standing = Standing(
            pending_tokens=pending,
            waiting=len(here) - len(decoding),
            running=len(decoding),
            context_tokens=sum(v.prefix_tokens + v.tail_tokens + v.generated for v in decoding),
            max_running=self.slots,
            reuse=0.0 if len(counted) < self.prefixes else 1.0,
        )
        cached = Cached(device=visit.prefix_tokens if self.has(visit.prefix) else 0)
        return Candidate(self.name, self.cost, standing, cached)

    def begin_step(self) -> float:
        """Choose the step's work; how long it takes, 0 if there is none."""
        budget = self.cost.step_tokens
        decoding = [visit for visit in self.running if not visit.uncached_tokens]
        work = [(visit, 1) for visit in decoding]
        budget -= len(work)
        for visit in self.running:
            if visit.uncached_tokens and budget:
                work.append((visit, min(budget, visit.uncached_tokens)))
                budget -= work[-1][1]
        computing = {v.prefix for v in self.running if v.uncached_tokens > v.tail_tokens}
        for visit in list(self.waiting):
            if not budget or len(self.running) == self.slots:
                break
            if visit.prefix not in self.held and visit.prefix in computing:
                continue
            self.waiting.remove(visit)
            self.running.append(visit)
            visit.uncached_tokens = visit.tail_tokens
            if visit.prefix in self.held:
                self.held.move_to_end(visit.prefix)
                visit.cached_tokens = visit.prefix_tokens
            else:
                visit.uncached_tokens += visit.prefix_tokens
                computing.add(visit.prefix)
            work.append((visit, min(budget, visit.uncached_tokens)))
            budget -= work[-1][1]
        self.stepping = work
        if not work:
            return 0.0
        tokens = sum(share for _, share in work)
        return self.cost.step_s(StepShape(tokens, len(work), 0, 0))

    def end_step(self, now_s: float) -> int:
        """Account for the step; how many visits are done with it."""
        done = 0
        for visit, share in self.stepping:
            if visit.uncached_tokens:
                visit.uncached_tokens -= share
                if visit.uncached_tokens <= visit.tail_tokens:
                    self._hold(visit.prefix)
                if visit.uncached_tokens:
                    continue
                visit.first_s = now_s
            visit.generated += 1
            if visit.generated == visit.answer_tokens:
                visit.done_s = now_s
                self.running.remove(visit)
                done += 1
        return done

    def _hold(self, prefix: int) -> None:
        self.held[prefix] = None
        self.held.move_to_end(prefix)
        while len(self.held) > self.prefixes:
            self.held.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. `hit_rate` is the share of prefix tokens that were found."""

    visits: Sequence[Visit]
    hit_rate: float
    ttft_p50_s: float
    ttft_p95_s: float
    requests_per_s: float

    def share_of(self, replica: int) -> float:
        return sum(visit.replica == replica for visit in self.visits) / len(self.visits)


def poisson(
    random: Random, *, requests: int, per_s: float, prefixes: int, answer_tokens: int = 32
) -> list[Visit]:
    """Requests that arrive independently, each with one of so many prefixes of 1,024 tokens and 64
    of its own."""
    now_s = 0.0
    visits = []
    for _ in range(requests):
        now_s += random.expovariate(per_s)
        visits.append(Visit(now_s, random.randrange(prefixes), 1024, 64, answer_tokens))
    return visits


def simulate(
    policy: RoutingPolicy,
    replicas: Sequence[SimulatedReplica],
    visits: Sequence[Visit],
    random: Random,
    *,
    clients: int | None = None,
    warm_up: int = 0,
) -> Outcome:
    """Run every visit to its end; the first `warm_up` are left out of the figures.

    They arrive at their times; or, with `clients`, each when one of so many is done with another.
    """
    coming = iter(visits)
    steps: list[tuple[float, int]] = []  # when a step ends, at which replica

    def begin(index: int, now_s: float) -> None:
        seconds = replicas[index].begin_step()
        replicas[index].busy = seconds > 0
        if seconds:
            heapq.heappush(steps, (now_s + seconds, index))

    def end(now_s: float, index: int) -> None:
        done = replicas[index].end_step(now_s)
        begin(index, now_s)
        if clients is not None:
            for visit in islice(coming, done):
                visit.arrival_s = now_s
                arrive(visit)

    def arrive(visit: Visit) -> None:
        request = RouteRequest(visit.prefix_tokens + visit.tail_tokens, visit.answer_tokens)
        candidates = [replica.candidate(visit) for replica in replicas]
        visit.replica = policy.choose(request, candidates, random)
        replicas[visit.replica].waiting.append(visit)
        if not replicas[visit.replica].busy:
            begin(visit.replica, visit.arrival_s)

    for visit in islice(coming, clients):
        while steps and steps[0][0] <= visit.arrival_s:
            end(*heapq.heappop(steps))
        arrive(visit)
    while steps:
        end(*heapq.heappop(steps))

    counted = visits[warm_up:]
    ttfts = quantiles((visit.ttft_s for visit in counted), n=20)
    took_s = max(visit.done_s for visit in counted) - counted[0].arrival_s
    return Outcome(
        counted,
        sum(v.cached_tokens for v in counted) / sum(v.prefix_tokens for v in counted),
        ttfts[9],
        ttfts[18],
        len(counted) / took_s,
    )
