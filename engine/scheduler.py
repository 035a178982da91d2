"""Who runs in the next step, on which pages.

One token budget per step, no prefill or decode modes: running streams first, then prompts, those
under way and those that are let in, by class and by their flows' counters
(`policies.waiting_line`), while budget, slots and pages last. When pages run out the least urgent
running sequence releases its pages to the cache and waits again, before those that never ran;
nothing of it is lost. It does so, too, for a waiting sequence of a more urgent priority, whose
prefill comes before its own; but not in its own turn, which a class gets now and then
(`policies.floors`).

While a step lies aside half done, another one can be made of prompts that are more urgent than all
of its own. Streams do not wait for what lies aside: they get their token in the other one. That
takes nothing from anybody who runs: slots and pages come from what is free.

A sequence whose KV is on its way up from a lower tier is passed by until it is there: waiting while
it is searched for, `loading` with its slot and pages while it is copied into them.

All that is continuous batching. Of other ways (`policies.batching`) nothing is different but who
waits: new ones wait in a lobby, until the last batch has ended and the next one is made of them.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from cache.promotion import Found
from cache.tiered_cache import TieredCache
from engine.sequence import Sequence
from engine.sequence_pages import SequencePages
from policies.batch_lobby import BatchLobby
from policies.batching import CONTINUOUS, Batching
from policies.floors import TURN_SHARE, ClassFloors
from policies.meter import Meter, place
from policies.scheduling import Rank, pick_victim
from policies.step_budget import StepBudget, Streams
from policies.waiting_line import WaitingLine

_GRANT_BLOCKS = 8
"""A class's turn is worth so many blocks' tokens."""
_CATCHING_UP = 0.5
"""Of its time between tokens, so much is left to a stream that is behind."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` of a sequence to compute, from `sequence.computed` on."""

    sequence: Sequence
    tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk ends at the last known token, so that a token can be sampled."""
        return self.sequence.computed + self.tokens == self.sequence.known


class Load(NamedTuple):
    """What is here to be done; see `EngineStats`."""

    pending_tokens: int
    context_tokens: int


class _Entry(Enum):
    """What came of trying to let a sequence in. `PASSED`: it waits for its KV, others may go."""

    STARTED = auto()
    PASSED = auto()
    NO_SLOT = auto()
    NO_PAGES = auto()


class Scheduler:
    """Owns the line, the running set, the slots and the pool. Step-loop thread only."""

    def __init__(
        self,
        cache: TieredCache,
        *,
        block_tokens: int,
        step_tokens: int,
        max_running: int,
        prompt_logprob_tokens: int,
        batching: Batching = CONTINUOUS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is the one that requests' deadlines are on."""
        self.pool = cache.device
        self.preemptions = 0
        self.running: list[Sequence] = []  # in rank order
        self.loading: list[Sequence] = []
        self._meter = Meter()
        self.waiting = WaitingLine[Sequence](self._meter)
        self._lobby = None if batching.continuous else BatchLobby[Sequence](batching, self._meter)
        self._pages = SequencePages(cache, block_tokens)
        self._cost = cache.cost
        self._clock = clock
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._prompt_logprob_tokens = prompt_logprob_tokens
        self._free_slots = deque(range(max_running))
        self._floors = ClassFloors(_GRANT_BLOCKS * block_tokens)
        self._held_back: set[int] = set()  # priorities that could have used more of the last step
        self._waiting_tokens = 0  # the sum of `uncached` over those who wait
        self._planned: dict[Sequence, int] = {}  # the step's tokens by sequence, while it is made
        self._short_of_pages = False
        self._preempted_before = 0
        self._aside: set[Sequence] | None = None  # those who wait for the step that lies aside
        self._gone_on: list[list[int]] = []  # pages of those who did not
        self._open_to_all = True  # whether a class's turn kept the others out of it

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line, and have its prompt searched for in every tier."""
        hits = self._pages.search(sequence)
        if self._lobby is None or sequence.begun:
            self.waiting.add(sequence)
        else:
            self._lobby.add(sequence)
        self._foresee(sequence, hits)

    @property
    def in_line(self) -> int:
        """How many do not run yet, whatever they wait for. Any thread."""
        lobby = 0 if self._lobby is None else len(self._lobby)
        return len(self.waiting) + len(self.loading) + lobby

    @property
    def takes_newcomers(self) -> bool:
        """Whether somebody who came now could begin while the step that was made last lies
        aside."""
        return bool(self._free_slots) and self._open_to_all and self._lobby is None

    @property
    def next_batch_s(self) -> float | None:
        """On the clock, when a batch is made though nobody comes or ends; None if none is then."""
        return None if self._lobby is None else self._lobby.next_due_s(self._in_batch)

    @property
    def _in_batch(self) -> int:
        """Of the batch that runs, those that have not ended; who was preempted still belongs to
        it."""
        return len(self.running) + len(self.loading) + len(self.waiting)

    def load(self) -> Load:
        """Exact between two steps. Of those who wait, what a lower tier will turn out to have, and
        what others will have computed until then, counts as theirs to compute."""
        pending, context = self._waiting_tokens, 0
        for sequence in self.running:
            computed = sequence.computed
            context += computed
            if computed < sequence.prefill_end:
                pending += sequence.prefill_end - computed
        for sequence in self.loading:
            loaded = len(sequence.pages) * self._block_tokens
            pending += max(1, sequence.prefill_end - loaded)
        return Load(pending, context)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, with pages for every one of their tokens.

        The sum of tokens is at most the step budget. Empty only if nothing can run.
        """
        self._planned = {}
        self._short_of_pages = False
        self._preempted_before = self.preemptions
        if self._lobby:  # is there one, and somebody in it
            for sequence in self._lobby.take_batch(self._clock(), self._in_batch):
                self.waiting.add(sequence)
        self._floors.step(self._meter.take_served(), self._held_back)
        streams, prefilling = self._plan_streams(self._step_tokens)
        budget = StepBudget(self._step_tokens, streams, self._block_tokens, self._cost.step_s)
        self._open_to_all = self._plan_turns(budget, prefilling)
        self._plan_prefills(budget, prefilling, self._open_to_all)
        self._held_back = set(self.waiting.priorities)
        for sequence in prefilling:
            if sequence.computed + self._planned.get(sequence, 0) < sequence.known:
                self._held_back.add(sequence.rank.priority)
        for sequence, priority in self._pages.leaders.take_urged().items():
            self._urge(sequence, priority)
        return [Chunk(sequence, tokens) for sequence, tokens in self._planned.items()]

    @contextmanager
    def put_aside(self, chunks: Ordered[Chunk]) -> Iterator[None]:
        """The step of these chunks, the last that `schedule` made, lies aside half done until it is
        over. Who waits for it keeps slot and pages, and may not be removed; the pages of who goes
        on without it are written to by nobody else either, since what is left of the step still
        writes the same there."""
        self._aside = {chunk.sequence for chunk in chunks}
        try:
            yield
        finally:
            self._aside = None
            for pages in self._gone_on:
                self.pool.release(pages, used=False)
            self._gone_on = []

    def schedule_beside(self, priority: int, tokens: int) -> list[Chunk]:
        """Chunks for a step while one lies aside: of at most so many tokens, of prompts more urgent
        than `priority`, and of those that come to their first token with that; and of all streams,
        which go on without the step that lies aside. Empty if there is no such prompt.

        It takes no longer than the streams can wait: with it they still meet their `tpot_s`, for
        this token or on the mean so far.
        """
        assert self._aside is not None
        self._planned = {}
        self._short_of_pages = False
        streams, prefilling = self._plan_streams(tokens, patient=True)
        budget = StepBudget(tokens, streams, self._block_tokens, self._cost.step_s)
        for sequence in prefilling:
            urgent = sequence.rank.priority < priority and sequence not in self._aside
            if urgent and budget.reaches(sequence.known - sequence.computed, sequence.computed):
                self._prefill(budget, sequence)
        if self._open_to_all:
            for sequence in self.waiting.in_order(self._clock()):
                before = sequence.known - sequence.uncached
                if sequence.rank.priority >= priority or not self._free_slots:
                    break
                if not budget.reaches(sequence.uncached, before):
                    break
                entry = self._let_in(sequence, prefilling)
                if entry is _Entry.STARTED and sequence not in self.loading:
                    prefilling.append(sequence)
                    self._prefill(budget, sequence)
                elif entry not in (_Entry.STARTED, _Entry.PASSED):
                    break
        going_on = self._aside.intersection(self._planned)
        if not any(
            each.rank.priority < priority and each.computed < each.prefill_end
            for each in self._planned
            if each not in going_on
        ):
            return []
        for sequence in going_on:
            self._gone_on.append(sequence.pages.copy())
            self.pool.hold(sequence.pages)
        self._aside -= going_on
        return [Chunk(sequence, tokens) for sequence, tokens in self._planned.items()]

    def commit(self, chunk: Chunk) -> None:
        """The chunk's KV is in the pages: count it and publish the blocks it filled."""
        sequence = chunk.sequence
        end = sequence.computed + chunk.tokens
        self._meter.serve(sequence, end, generates=end == sequence.known)
        prefilled = sequence.prompt_tokens + sequence.given
        done_now = sequence.computed < prefilled <= end
        sequence.computed = end
        self._pages.publish(sequence, end)
        if done_now:
            self._pages.prompt_done(sequence)
        if sequence.request.tpot_s is not None and end == sequence.known:
            sequence.token_s = self._clock()
            if sequence.paced_s is None:
                sequence.paced_s, sequence.paced_from = sequence.token_s, sequence.known

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and release what it holds. Idempotent."""
        assert self._aside is None or sequence not in self._aside
        self._pages.close_search(sequence)
        if sequence in self.loading:
            if sequence.leaving:
                return
            sequence.leaving = True  # its pages are being written: they are released after that
        elif sequence.slot is not None:
            self.running.remove(sequence)
            self._pages.leave(sequence)
            self._give_up_slot(sequence)
        elif self.waiting.remove(sequence) or self._left_lobby(sequence):
            self._forget_foreseen(sequence)
        else:
            return
        self._meter.end(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Let nobody find what a running sequence has published: its numbers have failed."""
        self._pages.unpublish(sequence)

    def _left_lobby(self, sequence: Sequence) -> bool:
        return self._lobby is not None and self._lobby.remove(sequence)

    def _plan_streams(
        self, tokens: int, *, patient: bool = False
    ) -> tuple[Streams, list[Sequence]]:
        """One token for everybody whose last one alone is to be computed, of so many. Returns them
        as one, and the others.

        `patient` gives the step what they are ahead of their pace, too: prompts that go on for long
        would leave nothing of that for who comes in the middle.
        """
        prefilling: list[Sequence] = []
        planned, block_tokens, left = self._planned, self._block_tokens, tokens
        now_s = self._clock()
        context, due_s, late_s = 0, math.inf, math.inf
        for sequence in self.running.copy():
            if sequence.slot is None:  # preempted for one before it
                continue
            known, computed = sequence.known, sequence.computed
            if known - computed > 1:
                prefilling.append(sequence)
                continue
            if not left:
                continue
            if computed < len(sequence.pages) * block_tokens:
                planned[sequence] = 1
            elif not self._plan(sequence, 1):
                continue
            left -= 1
            context += known
            target_s = sequence.request.tpot_s
            if target_s is not None:
                own_s, own_late_s = _next_due_s(sequence, target_s, now_s, patient=patient)
                if own_s < due_s:
                    due_s = own_s
                if own_late_s < late_s:
                    late_s = own_late_s
        if due_s == math.inf:
            return Streams(len(planned), context), prefilling
        return Streams(len(planned), context, due_s - now_s, late_s - now_s), prefilling

    def _plan_turns(self, budget: StepBudget, prefilling: list[Sequence]) -> bool:
        """Give those who have a turn what is theirs; adds to `prefilling` who is let in for it.
        Whether anybody else may be let in."""
        for sequence in prefilling:
            if sequence.turn and sequence.slot is not None:
                self._prefill_turn(budget, sequence)
        for priority in self._floors.due():
            own = [each for each in prefilling if each.slot is not None]
            own = [each for each in own if each.rank.priority == priority]
            if any(each.turn for each in own):
                continue
            if own:
                own[0].turn = self._floors.take(priority)
                self._prefill_turn(budget, own[0])
                continue
            for sequence in self.waiting.of_class(priority, self._clock()):
                entry = self._let_in(sequence, prefilling)
                if entry is _Entry.STARTED:
                    sequence.turn = self._floors.take(priority)
                    if sequence not in self.loading:
                        prefilling.append(sequence)
                        self._prefill_turn(budget, sequence)
                elif entry is _Entry.PASSED:
                    continue
                elif entry is _Entry.NO_PAGES and self._floors.closes_door(priority):
                    return False
                break
        return True

    def _plan_prefills(
        self, budget: StepBudget, prefilling: list[Sequence], open_to_all: bool
    ) -> None:
        """Prompts under way and prompts that are let in, in the order of their turns."""
        line = self._line() if open_to_all and budget.has_room else iter(())
        head = next(line, None)
        under_way = sorted(prefilling, key=place) if len(prefilling) > 1 else prefilling.copy()
        for sequence in under_way:
            while head is not None and budget.has_room and self._meter.precedes(head, sequence):
                head = self._next_head(budget, head, line, prefilling)
            if sequence.slot is not None:
                self._prefill(budget, sequence)
        while head is not None and budget.has_room:
            head = self._next_head(budget, head, line, prefilling)

    def _line(self) -> Iterator[Sequence]:
        """Those who wait, in the order of their turns, if any of them can be let in."""
        priorities = self.waiting.priorities
        if not priorities or not (self._free_slots or self._behind(priorities[0])):
            return iter(())
        return self.waiting.in_order(self._clock())

    def _next_head(
        self,
        budget: StepBudget,
        head: Sequence,
        line: Iterator[Sequence],
        prefilling: list[Sequence],
    ) -> Sequence | None:
        """Let the head of the line in. Returns the next one; None if that is all for this step."""
        if self._short_of_pages or (
            self.preemptions != self._preempted_before and not self._behind(head.rank.priority)
        ):
            return None
        entry = self._let_in(head, prefilling)
        if entry is _Entry.STARTED and head not in self.loading:
            prefilling.append(head)
            self._prefill(budget, head)
        # strict order: nobody overtakes a sequence that waits for a slot or for pages
        return next(line, None) if entry in (_Entry.STARTED, _Entry.PASSED) else None

    def _let_in(self, sequence: Sequence, prefilling: list[Sequence]) -> _Entry:
        """Give a waiting sequence a slot and the pages that were found for it, if it can begin; who
        is less urgent makes room."""
        if not self._free_slots and not self._behind(sequence.rank.priority):
            return _Entry.NO_SLOT
        if sequence.lookup is not None and sequence.lookup.pending:
            return _Entry.PASSED
        found = self._pages.find(sequence)
        hits = len(found.pages) + len(found.slots)
        follows = self._pages.follows(sequence, hits)
        if not follows or hits >= sequence.reach:
            self._foresee(sequence, hits)
        if follows:
            return _Entry.PASSED
        while not self._free_slots or not self._fits(sequence, found, prefilling):
            behind = self._behind(sequence.rank.priority)
            if not behind:
                return _Entry.NO_PAGES if self._free_slots else _Entry.NO_SLOT
            self._preempt(behind[-1])
            found = self._pages.find(sequence)  # nobody held what was found before
        hits = len(found.pages) + len(found.slots)
        self._meter.begin(sequence, hits * self._block_tokens)
        self.waiting.remove(sequence)
        self._forget_foreseen(sequence)
        self._pages.hold(sequence, found)
        sequence.slot = self._free_slots.popleft()
        if found.slots:
            self._load(sequence, found)
        else:
            self._start(sequence, loaded_from=len(sequence.pages))
        return _Entry.STARTED

    def _behind(self, priority: int) -> list[Sequence]:
        """Running sequences that make room for one of this priority, the first to do so last."""
        if self._aside is not None:
            return []
        if not self.running or self.running[-1].rank.priority <= priority:
            return []
        return [each for each in self.running if each.rank.priority > priority and not each.turn]

    def _fits(self, sequence: Sequence, found: Found, prefilling: list[Sequence]) -> bool:
        """Whether there are pages for every known token and one more block, besides those that the
        prompts under way will take."""
        reserve = 1 if self.running or self.loading else 0
        if prefilling:
            reserve += self._pages.missing(each for each in prefilling if each.slot is not None)
        return self._pages.fits(sequence, found.pages, reserve)

    def _load(self, sequence: Sequence, found: Found) -> None:
        """Have what lies in DRAM copied into pages; the sequence runs when it is there."""
        self.loading.append(sequence)

        def done(loaded_from: int) -> None:
            self.loading.remove(sequence)
            if sequence.leaving:
                self._pages.release(sequence)
                self._give_up_slot(sequence)
            else:
                self._start(sequence, loaded_from=loaded_from)

        self._pages.load(sequence, found, done)

    def _start(self, sequence: Sequence, *, loaded_from: int) -> None:
        self._pages.start(sequence, loaded_from=loaded_from)
        insort(self.running, sequence, key=_rank)

    def _prefill_turn(self, budget: StepBudget, sequence: Sequence) -> None:
        """Part of the step for who has a turn, before all others' prompts."""
        part = budget.prefill(budget.left, sequence.computed) // TURN_SHARE
        self._prefill(budget, sequence, most=max(1, part))

    def _prefill(self, budget: StepBudget, sequence: Sequence, *, most: int | None = None) -> None:
        """Compute of a prompt what the step has room for, but not more than `most`."""
        planned = self._planned.get(sequence, 0)
        wanted = sequence.known - sequence.computed
        if sequence.request.params.prompt_logprobs is not None and not sequence.generated:
            # every row's logits are needed: keep [rows, vocab] small
            wanted = min(wanted, self._prompt_logprob_tokens)
        wanted -= planned
        if most is not None:
            wanted = min(wanted, most)
        tokens = budget.prefill(wanted, sequence.computed + planned)
        if tokens and self._plan(sequence, planned + tokens):
            budget.take(tokens, sequence.computed + planned)

    def _plan(self, sequence: Sequence, tokens: int) -> bool:
        """Put the sequence down for so many tokens, with pages for them; preempts others for it.

        False if that is not enough: then it waits for pages that transfers hold, or, if there are
        none, is preempted itself. While a step lies aside, nobody is.
        """
        while self._pages.lacking(sequence, tokens) > 0:
            if self._aside is not None:
                self._short_of_pages = True
                return False
            victim = self._victim(sequence)
            if victim is sequence and (self.loading or self._pages.copies_down):
                self._short_of_pages = True
                return False
            self._preempt(victim)
            if victim is sequence:
                self._short_of_pages = True
                return False
        self._pages.grow(sequence, tokens)
        self._planned[sequence] = tokens
        return True

    def _victim(self, sequence: Sequence) -> Sequence:
        """Who gives its pages to this one, maybe itself; not those who have a turn."""
        running = [each for each in self.running if not each.turn or each is sequence]
        return running[pick_victim([each.rank for each in running])]

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._planned.pop(sequence, None)  # what it was to compute is not spent otherwise
        self._pages.release(sequence)
        self._give_up_slot(sequence)
        sequence.forget_progress()
        self.preemptions += 1
        self.add(sequence)

    def _give_up_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        self._meter.settle(sequence)
        self._floors.give_back(sequence.rank.priority, sequence.turn)
        sequence.turn = 0.0

    def _urge(self, sequence: Sequence, priority: int) -> None:
        """Make a leader as urgent as who waits for it."""
        waits = self.waiting.remove(sequence)  # it may have been preempted since
        sequence.rank = sequence.rank._replace(priority=priority)
        self._meter.moved(sequence)
        if waits:
            self.waiting.add(sequence)
        elif sequence.slot is not None and sequence not in self.loading:
            self.running.sort(key=_rank)

    def _foresee(self, sequence: Sequence, hits: int) -> None:
        """What a waiting sequence will compute, given that its first `hits` blocks are there."""
        reach = self._pages.reach(sequence, hits)
        uncached = max(1, sequence.known - reach * self._block_tokens)
        self._waiting_tokens += uncached - sequence.uncached
        sequence.reach, sequence.uncached = reach, uncached

    def _forget_foreseen(self, sequence: Sequence) -> None:
        self._waiting_tokens -= sequence.uncached
        sequence.reach = sequence.uncached = 0


def _next_due_s(
    sequence: Sequence, tpot_s: float, now_s: float, *, patient: bool
) -> tuple[float, float]:
    """When a stream's next token is due, if `tpot_s` is to be the mean since its first one: earlier
    than that after the last one where it is behind, which is made up for in steps of half that time
    at least; and later where it is ahead, but only if it is `patient`. And when it would be due if
    it were not behind."""
    last_s, paced_s = sequence.token_s, sequence.paced_s
    if last_s is None or paced_s is None:
        next_s = now_s + tpot_s  # its first one, of a prompt whose last token alone was not cached
        return next_s, next_s
    next_s = last_s + tpot_s
    on_pace_s = paced_s + (sequence.known - sequence.paced_from) * tpot_s
    if on_pace_s < next_s:
        return max(on_pace_s, last_s + _CATCHING_UP * tpot_s), next_s
    return (on_pace_s, on_pace_s) if patient else (next_s, next_s)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
