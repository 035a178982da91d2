"""What this gateway has put on one replica and has not seen the end of."""

from __future__ import annotations

import asyncio
from types import TracebackType

from gateway.dispatch.answers import AnswerLengths
from policies.routing import Queued, Standing

MOST_URGENT = 0
"""Priorities begin here: nothing overtakes a sequence of this one while it waits."""
_ROOM_SHARE = 1 / 8
"""A cache has room while so much of it is free: what is on its way there fits as well."""


class Load:
    """Kept by scope: what a request adds is taken back when its scope ends, once, on every path.

    `foreign` is what other gateways say they have put on the same replica. How long answers are is
    learned from those that end here; until the first has, from those of the model's other replicas.
    """

    def __init__(self, max_running: int, capacity: int | None) -> None:
        """`capacity` is how many sequences the replica takes at once, running and waiting; None is
        any number."""
        self.max_running = max_running
        self._capacity = capacity
        self._pending_tokens = 0
        self._waiting = 0
        self._running = 0
        self._context_tokens = 0
        self._overtakable: dict[int, Queued] = {}
        self._answers = AnswerLengths()
        self._all_answers = AnswerLengths()
        self._usual_answers = self._all_answers
        self._reuse = Standing().reuse
        self._foreign = Standing()
        self._standing: Standing | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def share(
        self, uncached_tokens: int, prompt_tokens: int, priority: int = MOST_URGENT
    ) -> LoadShare:
        """One sequence's part, pending until it has begun and running from then on. A scope: it
        counts from entering to leaving."""
        return LoadShare(self, uncached_tokens, prompt_tokens, priority)

    def set_foreign(self, foreign: Standing) -> None:
        """What others have put on it, as last heard."""
        if foreign != self._foreign:
            self._foreign = foreign
            self._standing = None

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
            self._standing = None

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

    def standing(self) -> Standing:
        """Everybody's part, as routing wants it. The same object as long as nothing has changed."""
        standing = self._standing
        # nobody tells those who go by others' answers when these change
        if standing is None or standing.answer_tokens != self._usual_answers.tokens:
            standing = self._standing = self._sum()
        return standing

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
            queued=tuple(self._overtakable[priority] for priority in sorted(self._overtakable)),
            answer_tokens=self._usual_answers.tokens,
            reuse=self._reuse,
        )

    def _wait(self, uncached_tokens: int, sequences: int, priority: int) -> None:
        """More sequences wait, or fewer, with so many tokens more or fewer to compute."""
        self._pending_tokens += uncached_tokens
        self._waiting += sequences
        if priority > MOST_URGENT:
            _, others, tokens, _, _ = self._overtakable.get(priority, Queued(priority, 0, 0))
            queued = Queued(priority, others + sequences, tokens + uncached_tokens)
            if queued.sequences:
                self._overtakable[priority] = queued
            else:
                del self._overtakable[priority]
        self._changed()

    def _run(self, sequences: int, context_tokens: int) -> None:
        """More sequences run, or fewer."""
        self._running += sequences
        self._context_tokens += context_tokens
        self._changed()

    def _changed(self) -> None:
        self._standing = None
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
        "_load",
        "_over",
        "_priority",
        "_prompt_tokens",
        "_uncached_tokens",
    )

    def __init__(self, load: Load, uncached_tokens: int, prompt_tokens: int, priority: int) -> None:
        self._load = load
        self._uncached_tokens = uncached_tokens
        self._prompt_tokens = prompt_tokens
        self._priority = priority
        self._answer_tokens = 0
        self._began = False
        self._over = False

    def __enter__(self) -> LoadShare:
        self._load._wait(self._uncached_tokens, 1, self._priority)
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
            self._load._run(1, self._prompt_tokens)
            self._load._wait(-self._uncached_tokens, -1, self._priority)

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
            self._load._run(-1, -self._prompt_tokens)
        else:
            self._load._wait(-self._uncached_tokens, -1, self._priority)
        if self._answer_tokens:
            self._load._note_answer(self._answer_tokens)
