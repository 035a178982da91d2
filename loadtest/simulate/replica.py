"""One replica's step loop, in simulated time.

As `engine.scheduler` has it: running streams get their token, prompts share what the step has left
(`policies.step_budget`) in the order of `policies.waiting_line` and `policies.meter`, sequences are
let in while slots and pages last, and when pages run out the least urgent and newest one gives its
own to the cache. Who would compute what another one is just computing waits for it.

Not simulated: turns of classes that are held back (`policies.floors`), steps that are put aside,
and leaders that become as urgent as who waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, sqrt
from random import Random
from typing import Protocol

from loadtest.simulate.clock import Clock
from loadtest.simulate.job import SimJob
from loadtest.simulate.job_pages import JobPages
from loadtest.simulate.spec import SimSpec
from loadtest.simulate.streams import StreamSet
from loadtest.simulate.stretch import Stretch
from loadtest.simulate.tiers import ReplicaTiers
from policies.batch_lobby import BatchLobby
from policies.cost import StepShape
from policies.meter import Meter, place
from policies.scheduling import Rank, pick_victim
from policies.step_budget import StepBudget
from policies.waiting_line import WaitingLine

_MANY_TOKENS = 1 << 20
"""So many that the constant of a step does not drown what they take."""


class Watcher(Protocol):
    """Who is told what becomes of jobs."""

    def began(self, job: SimJob) -> None:
        """Its first token is there."""

    def moves(self, job: SimJob) -> bool:
        """That was not its only one. Whether another replica generates the others."""

    def ended(self, job: SimJob) -> None:
        """Its last token is there."""


class Replica:
    """Number `index`. Tells `watcher`, and plans its steps on `clock`."""

    def __init__(
        self,
        index: int,
        spec: SimSpec,
        block_tokens: int,
        tiers: ReplicaTiers,
        clock: Clock,
        watcher: Watcher,
    ) -> None:
        self.index = index
        self.tiers = tiers
        self.pool = tiers.device
        self.busy_s = 0.0
        self.line_s = 0.0
        """Sum over jobs of the time in its line, until they were first let in."""
        self.preemptions = 0
        self._spec = spec
        self._cost = spec.cost
        self._step_s = spec.cost.step_s
        # by so much each token of context makes a stream's step longer
        context = StepShape(0, 0, _MANY_TOKENS, _MANY_TOKENS)
        empty = StepShape(0, 0, 0, 0)
        self._growth_s = (self._step_s(context) - self._step_s(empty)) / _MANY_TOKENS
        self._block_tokens = block_tokens
        self._clock = clock
        self._watcher = watcher
        self._meter = Meter()
        self._line: WaitingLine[SimJob] = WaitingLine(self._meter)
        self._running: dict[SimJob, None] = {}  # in slots: streams, prompts, those being loaded
        self._prefilling: list[SimJob] = []
        self._streams = StreamSet(block_tokens)
        self._pages = JobPages(tiers, block_tokens, keeps_answers=spec.prompt_cache)
        self._lobby = (
            None if spec.batching.continuous else BatchLobby[SimJob](spec.batching, self._meter)
        )
        self._arrivals = 0
        self._random = Random(f"{spec.seed}/{index}") if spec.noise else None
        # the step, or the stretch of steps, that is under way
        self._plan: list[tuple[SimJob, int]] = []
        self._stretch: Stretch | None = None
        self._version = 0
        self._stepping = False
        self._paid = False  # whether streams have their pages for the step that is being made
        self._preempted_before = 0

    @property
    def steps(self) -> int:
        """How many it has made."""
        return self._streams.steps

    @property
    def sequences(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        lobby = 0 if self._lobby is None else len(self._lobby)
        return len(self._running), len(self._line) + lobby

    @property
    def _in_batch(self) -> int:
        """Of the batch that runs, those that have not ended, the preempted included."""
        return len(self._running) + len(self._line)

    @property
    def has_room(self) -> bool:
        """Whether what is computed here next pushes nothing out: an eighth of the pages is free."""
        return self.pool.free * 8 >= self.pool.total

    def submit(self, job: SimJob) -> None:
        """One more in line."""
        self._arrivals += 1
        job.arrive(self._clock.now_s, self._arrivals)
        if not job.shipped:
            self.tiers.look_up(job)
        self._foresee(job)
        if self._lobby is None:
            self._line.add(job)
        else:
            self._lobby.add(job)
        if job.ready_s > self._clock.now_s:
            self._clock.at(job.ready_s, lambda _: self._landed(job))
        elif len(self._running) < self._spec.max_running or self._behind(job.rank.priority):
            self._look()

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is here, and the books agree."""
        assert not self._running, "somebody still runs"
        assert not len(self._line), "somebody still waits"
        assert not self._lobby, "somebody still waits for a batch"
        self._streams.check_empty()
        self._pages.check_integrity([])

    def _landed(self, job: SimJob) -> None:
        self.tiers.land(job)
        self._look()

    def _look(self, _: int = 0) -> None:
        """Something may begin that could not before: at once if nothing runs, else with the next
        step."""
        if not self._stepping:
            self._begin()
            return
        stretch = self._stretch
        if stretch is not None:
            steps = stretch.steps_until(self._clock.now_s)
            if steps < stretch.steps:
                end_s = stretch.end_s(steps)
                self.busy_s -= stretch.end_s(stretch.steps) - end_s
                stretch.steps = steps
                self._schedule(end_s)

    def _schedule(self, end_s: float) -> None:
        self._version += 1
        self._clock.at(end_s, self._end, self._version)

    def _begin(self) -> None:
        """Make the next step, and plan its end."""
        now_s, streams, plan = self._clock.now_s, self._streams, self._plan
        plan.clear()
        self._stretch = None
        self._preempted_before = self.preemptions
        if self._lobby:  # is there one, and somebody in it
            for job in self._lobby.take_batch(now_s, self._in_batch):
                self._line.add(job)
        if streams.count:
            while (pages := streams.pages(1, 1)) > self.pool.available:
                self._preempt(self._victim())
            self.pool.take(pages)
        self._paid = True
        if self._prefilling or len(self._line):
            self._plan_prefills(now_s)
        if plan:
            end_s = now_s + self._step_s(self._shape()) * self._noise(1)
        elif streams.count:
            stretch = self._stretch = self._make_stretch(now_s)
            end_s = stretch.end_s(stretch.steps)
        else:
            self._paid = self._stepping = False
            self._wake_for_batch()
            return
        self._stepping = True
        self.busy_s += end_s - now_s
        self._schedule(end_s)

    def _end(self, version: int) -> None:
        """The step is over, or the stretch of them."""
        if version != self._version:
            return
        stretch, streams = self._stretch, self._streams
        steps = 1
        if stretch is not None:
            steps = stretch.steps
            if pages := streams.pages(2, steps - 1):
                self.pool.take(pages)
        self._paid = False
        for job in streams.advance(steps):
            self._leave_streams(job)
            self._finish(job)
        for job, chunk in self._plan:
            self._commit(job, chunk)
        self._begin()

    def _shape(self) -> StepShape:
        streams = self._streams
        tokens, attended = streams.count, streams.context_tokens
        read = attended
        for job, chunk in self._plan:
            computed = job.computed
            tokens += chunk
            attended += chunk * computed + chunk * (chunk + 1) // 2
            read += computed + chunk
        return StepShape(tokens, streams.count + len(self._plan), attended, read)

    def _make_stretch(self, now_s: float) -> Stretch:
        """Steps of the streams alone: until the first answer ends, or pages do."""
        streams = self._streams
        count, context = streams.count, streams.context_tokens
        steps = streams.steps_left()
        room = self.pool.available
        if count * (steps // self._block_tokens + 1) > room:
            while steps > 1 and streams.pages(2, steps - 1) > room:
                steps = (steps + 1) // 2
        first_s = self._step_s(StepShape(count, count, context, context))
        factor = self._noise(steps)
        return Stretch(now_s, steps, first_s * factor, self._growth_s * count * factor)

    def _noise(self, steps: int) -> float:
        """By how much so many steps together take longer than they should."""
        if self._random is None:
            return 1.0
        return exp(self._random.gauss(0.0, self._spec.noise / sqrt(steps)))

    def _plan_prefills(self, now_s: float) -> None:
        """Prompts under way and prompts that are let in, in the order of their turns."""
        cost = self._cost
        budget = StepBudget(
            cost.step_tokens, self._streams.as_one(), cost.block_tokens, self._step_s
        )
        under_way = sorted(self._prefilling, key=place)
        line = self._in_line(now_s, budget)
        head = next(line, None)
        for job in under_way:
            while head is not None and budget.has_room and self._meter.precedes(head, job):
                head = self._next_head(head, line, budget)
            if job in self._running:
                self._prefill(job, budget)
        while head is not None and budget.has_room:
            head = self._next_head(head, line, budget)

    def _in_line(self, now_s: float, budget: StepBudget) -> Iterator[SimJob]:
        """Those who may be let in, in the order of their turns."""
        line, running = self._line, self._running
        if not len(line) or not budget.has_room:
            return iter(())
        if len(running) >= self._spec.max_running and not self._behind(line.priorities[0]):
            return iter(())
        return line.in_order(now_s)

    def _next_head(self, head: SimJob, line: Iterator[SimJob], budget: StepBudget) -> SimJob | None:
        """Let the head of the line in. Returns the next one; None if that is all for this step."""
        priority = head.rank.priority
        if self.preemptions != self._preempted_before and not self._behind(priority):
            return None
        if head.ready_s > self._clock.now_s:
            return next(line, None)
        found, loadable = self._find(head)
        follows = self._pages.follows(head, found + loadable)
        self._pages.foresee(head, found + loadable)
        if follows:
            return next(line, None)
        while len(self._running) >= self._spec.max_running or not self._pages.fits(
            head, found, 1 if self._running else 0
        ):
            behind = self._behind(priority)
            if not behind:
                return None
            self._preempt(max(behind, key=_rank))
            found, loadable = self._find(head)
        self._let_in(head, found, loadable)
        if head in self._prefilling:
            self._prefill(head, budget)
        return next(line, None)

    def _find(self, job: SimJob) -> tuple[int, int]:
        """How many of its first blocks are on the device, and how many behind those to load."""
        found = self._pages.found(job)
        return found, self.tiers.loadable(job, found) if found < len(job.blocks) else 0

    def _foresee(self, job: SimJob) -> None:
        """What it will compute, as one who comes to wait."""
        self._pages.foresee(job, self.tiers.here(job, self._pages.found(job)))

    def _behind(self, priority: int) -> list[SimJob]:
        """Who runs and makes room for one of this priority."""
        return [each for each in self._preemptible() if each.rank.priority > priority]

    def _preemptible(self) -> list[SimJob]:
        """All who run but those whose pages are being written."""
        return [each for each in self._running if each.end_step or each in self._prefilling]

    def _victim(self) -> SimJob:
        """Who gives its pages up."""
        running = self._preemptible()
        return running[pick_victim([job.rank for job in running])]

    def _let_in(self, job: SimJob, found: int, loadable: int) -> None:
        if not job.begun:
            self.line_s += self._clock.now_s - job.arrived_s
        before = job.known - 1 if job.shipped else (found + loadable) * self._block_tokens
        self._meter.begin(job, before)
        self._line.remove(job)
        self._running[job] = None
        self._pages.hold(job, found)
        if job.shipped:
            job.tiers = job.tiers or (0, 0, 0)
            self._streams.join(job)
        elif loadable:
            done_s = self.tiers.copy_up(job.blocks[found : found + loadable])
            self._clock.at(done_s, lambda _: self._loaded(job, found, found + loadable))
        else:
            self._start(job, found, found)

    def _loaded(self, job: SimJob, on_device: int, blocks: int) -> None:
        """The first `blocks` of its blocks are on the device by now."""
        job.computed = min(blocks * self._block_tokens, job.known - 1)
        self._pages.publish(job, blocks)
        self._start(job, on_device, blocks)
        self._look()

    def _start(self, job: SimJob, on_device: int, found: int) -> None:
        """It runs, with so many of its blocks found, the first of them on the device."""
        if job.tiers is None:  # counted once, whatever happens later
            size = self._block_tokens
            cached = min(found * size, job.prompt_tokens - 1)
            device = min(on_device * size, cached)
            landed = sum(1 for index in job.landed if on_device <= index < found)
            redis = min(landed * size, cached - device)
            job.tiers = (device, cached - device - redis, redis)
            job.cached_blocks = found
            for node in job.nodes:
                node.hits += 1
        self._prefilling.append(job)

    def _prefill(self, job: SimJob, budget: StepBudget) -> None:
        tokens = budget.prefill(job.known - job.computed, job.computed)
        if tokens:
            budget.take(tokens, job.computed)
            self._plan.append((job, tokens))

    def _commit(self, job: SimJob, chunk: int) -> None:
        """A chunk of its prompt is computed."""
        end = job.computed + chunk
        last = end == job.known
        self._meter.serve(job, end, generates=last)
        job.computed = end
        if job.published < len(job.blocks):
            whole = end >= job.prompt_tokens
            self._pages.publish(job, len(job.blocks) if whole else end // self._block_tokens)
        if last:
            self._prefilling.remove(job)
            self._generated_first(job)

    def _generated_first(self, job: SimJob) -> None:
        """A token has come of its prompt, or of what it knew when it began again."""
        job.generated += 1
        job.known += 1
        more = job.generated < job.answer_tokens
        moves = False
        if job.first_s is None:
            job.first_s = self._clock.now_s
            self.tiers.prompt_done(job)
            self._watcher.began(job)
            moves = more and self._watcher.moves(job)
        if more and not moves:
            self._streams.join(job)
        else:
            self._finish(job, moves=moves)

    def _leave_streams(self, job: SimJob) -> None:
        before = job.known
        generated = self._streams.leave(job)
        if generated:
            assert job.counters is not None
            # one of them is in what it is served for computing
            job.counters.charge(job.flow, generated - 1, job.weight)
            job.computed = before - 1
            self._meter.serve(job, job.known - 1, generates=True)
        job.computed = job.known - 1
        self._pages.grown(job, job.known if self._paid else job.computed)

    def _finish(self, job: SimJob, *, moves: bool = False) -> None:
        del self._running[job]
        self._meter.settle(job)
        self._meter.end(job)
        self._pages.release(job)
        if not moves:
            self._watcher.ended(job)

    def _preempt(self, job: SimJob) -> None:
        """Its pages go to the cache, and it waits at its old place in line."""
        if job.end_step:
            self._leave_streams(job)
        else:
            self._prefilling.remove(job)
            self._plan[:] = [each for each in self._plan if each[0] is not job]
        del self._running[job]
        self._meter.settle(job)
        self._pages.release(job)
        job.begun = True
        job.shipped = False
        job.computed = 0
        self.preemptions += 1
        self._foresee(job)
        self._line.add(job)

    def _wake_for_batch(self) -> None:
        """No step is made; those who wait may be a batch later."""
        if self._lobby is None:
            return
        due_s = self._lobby.next_due_s(self._in_batch)
        if due_s is not None:
            self._clock.at(due_s, self._look)


def _rank(job: SimJob) -> Rank:
    return job.rank
