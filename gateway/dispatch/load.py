"""What this gateway has put on one replica and has not seen the end of."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType

from policies.answer_lengths import AnswerLengths
from policies.routing import Standing
from policies.work_by_priority import MOST_URGENT, WorkByPriority

_WAITING_SHARES = (1.0, 7 / 8, 1 / 2)
"""Of the places in line, what may be taken before a request of each priority is refused; the last
is that of every priority behind. So the last places are for the more urgent, and who may be refused
is refused first."""
_ROOM_SHARE = 1 / 8
"""A cache has room while so much of it is free: what is on its way there fits as well."""


class Load:
    """Kept by scope: what a request adds is taken back when its scope ends, once, on every path.

    `foreign` is what other gateways say they have put on the same replica. How long answers are is
    learned from those that end here; until the first has, from those of the model's other replicas.
    """

    def __init__(
        self,
        max_running: int,
        capacity: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity` is how many sequences the replica takes at once, running and waiting; None is
        any number."""
        self.max_running = max_running
        self._clock = clock
        self._capacity = capacity
        self._places = tuple(
            math.inf
            if capacity is None
            else max_running + math.ceil(share * max(0, capacity - max_running))
            for share in _WAITING_SHARES
        )
        self._listener: Callable[[], None] | None = None
        self._pending_tokens = 0
        self._waiting = 0
        self._running = 0
        self._context_tokens = 0
        self._work = WorkByPriority()
        self._answers = AnswerLengths()
        self._all_answers = AnswerLengths()
        self._usual_answers = self._all_answers
        self._reuse = Standing().reuse
        self._foreign = Standing()
        self._standing: Standing | None = None
        self._crowded: Standing | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def share(
        self,
        uncached_tokens: int,
        prompt_tokens: int,
        priority: int = MOST_URGENT,
        flow: bytes = b"",
        weight: float = 1.0,
    ) -> LoadShare:
        """One sequence's part, pending until it has begun and running from then on. A scope: it
        counts from entering to leaving."""
        return LoadShare(self, uncached_tokens, prompt_tokens, priority, flow, weight)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a request may fare otherwise here than before."""
        self._listener = listener

    def set_foreign(self, foreign: Standing) -> None:
        """What others have put on it, as last heard."""
        if foreign != self._foreign:
            self._foreign = foreign
            self._renew()

    def learn_with(self, answers: AnswerLengths) -> None:
        """`answers` are those of all the model's replicas: they are told of this one's."""
        self._all_answers = answers
        if not self._answers.tokens:
            self._usual_answers = answers

    def note_pages(self, free: int, total: int) -> None:
        """So much of the replica's cache is free: what is computed there pushes nothing out as long
        as it has room. Where nobody says, it is taken to be full."""
        reuse = 0.0 if free >= total * _ROOM_SHARE else 1.0
        if reuse != self._reuse:
            self._reuse = reuse
            self._renew()

    @property
    def sequences(self) -> int:
        """How many of this gateway's are there."""
        return self._waiting + self._running

    async def wait_empty(self) -> None:
        """Wait until none is."""
        await self._empty.wait()

    def own(self) -> Standing:
        """This gateway's part."""
        return Standing(
            self._pending_tokens,
            self._waiting,
            self._running,
            self._context_tokens,
            self.max_running,
        )

    def standing(self, priority: int = MOST_URGENT) -> Standing:
        """Everybody's part, as routing wants it. The same object as long as nothing has changed.
        For those who are less urgent it is full earlier."""
        standing = self._standing
        # nobody tells those who go by others' answers when these change
        if standing is None or standing.answer_tokens != self._usual_answers.tokens:
            standing = self._standing = self._sum()
            self._crowded = None
        if priority and standing.waiting + standing.running >= self.places(priority):
            if self._crowded is None:
                self._crowded = standing._replace(full=True)
            return self._crowded
        return standing

    def places(self, priority: int) -> float:
        """How many sequences may be here, running and waiting, for one of this priority to be taken
        still: less than that."""
        return self._places[min(priority, len(_WAITING_SHARES) - 1)]

    def _sum(self) -> Standing:
        foreign = self._foreign
        waiting = self._waiting + foreign.waiting
        running = self._running + foreign.running
        return Standing(
            pending_tokens=self._pending_tokens + foreign.pending_tokens,
            waiting=waiting,
            running=running,
            context_tokens=self._context_tokens + foreign.context_tokens,
            max_running=self.max_running,
            full=self._capacity is not None and waiting + running >= self._capacity,
            queued=self._work.queued(),
            answer_tokens=self._usual_answers.tokens,
            reuse=self._reuse,
            yielding=self._work.yielding(),
        )

    def _wait(
        self, uncached_tokens: int, sequences: int, priority: int, flow: bytes, weight: float
    ) -> None:
        """As `WorkByPriority.wait`."""
        self._pending_tokens += uncached_tokens
        self._waiting += sequences
        self._work.wait(sequences, uncached_tokens, priority, flow, weight, self._clock())
        self._changed()

    def _run(self, sequences: int, context_tokens: int, priority: int) -> None:
        """More sequences run, or fewer."""
        self._running += sequences
        self._context_tokens += context_tokens
        self._work.run(sequences, priority)
        self._changed()

    def _renew(self) -> None:
        self._standing = None
        if self._listener is not None:
            self._listener()

    def _changed(self) -> None:
        self._renew()
        if self._waiting or self._running:
            self._empty.clear()
        else:
            self._empty.set()

    def _note_answer(self, tokens: int) -> None:
        self._answers.add(tokens)
        self._all_answers.add(tokens)
        self._usual_answers = self._answers


class LoadShare:
    """One sequence's part of a replica's load, for as long as its scope lasts."""

    __slots__ = (
        "_answer_tokens",
        "_began",
        "_flow",
        "_load",
        "_over",
        "_priority",
        "_prompt_tokens",
        "_uncached_tokens",
        "_weight",
    )

    def __init__(
        self,
        load: Load,
        uncached_tokens: int,
        prompt_tokens: int,
        priority: int,
        flow: bytes,
        weight: float,
    ) -> None:
        self._load = load
        self._uncached_tokens = uncached_tokens
        self._prompt_tokens = prompt_tokens
        self._priority = priority
        self._flow = flow
        self._weight = weight
        self._answer_tokens = 0
        self._began = False
        self._over = False

    def __enter__(self) -> LoadShare:
        self._waits(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def begin(self) -> None:
        """Its prompt is computed. Idempotent."""
        if not self._began and not self._over:
            self._began = True
            # it runs before it ceases to wait: at no time is it nowhere
            self._load._run(1, self._prompt_tokens, self._priority)
            self._waits(-1)

    def answered(self, tokens: int) -> None:
        """So many tokens were generated there, in all; said before the end, or never. Of one with
        none, nothing is learned."""
        self._answer_tokens = tokens

    def end(self) -> None:
        """It is there no longer. Idempotent."""
        if self._over:
            return
        self._over = True
        if self._began:
            self._load._run(-1, -self._prompt_tokens, self._priority)
        else:
            self._waits(-1)
        if self._answer_tokens:
            self._load._note_answer(self._answer_tokens)

    def _waits(self, sequences: int) -> None:
        """It is one more that waits, or one fewer."""
        self._load._wait(
            sequences * self._uncached_tokens, sequences, self._priority, self._flow, self._weight
        )
