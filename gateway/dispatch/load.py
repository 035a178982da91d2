"""What this gateway has put on one replica and has not seen the end of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from policies.routing import Standing


class Load:
    """Kept by scope: what a request adds is taken back when its scope ends, once, on every path.

    `foreign` is what other gateways say they have put on the same replica.
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
        self._foreign = Standing()
        self._standing: Standing | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def share(self, uncached_tokens: int, prompt_tokens: int) -> Iterator[LoadShare]:
        """One sequence's part, pending until it has begun and running from then on."""
        share = LoadShare(self, uncached_tokens, prompt_tokens)
        self._change(uncached_tokens, 1, 0, 0)
        try:
            yield share
        finally:
            share.end()

    def set_foreign(self, foreign: Standing) -> None:
        """What others have put on it, as last heard."""
        if foreign != self._foreign:
            self._foreign = foreign
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
        """Everybody's part, as routing wants it."""
        if self._standing is None:
            foreign = self._foreign
            waiting = self._waiting + foreign.waiting
            running = self._running + foreign.running
            self._standing = Standing(
                self._pending_tokens + foreign.pending_tokens,
                waiting,
                running,
                self._context_tokens + foreign.context_tokens,
                self.max_running,
                self._capacity is not None and waiting + running >= self._capacity,
            )
        return self._standing

    def _change(self, pending_tokens: int, waiting: int, running: int, context: int) -> None:
        self._pending_tokens += pending_tokens
        self._waiting += waiting
        self._running += running
        self._context_tokens += context
        self._standing = None
        if self.sequences:
            self._empty.clear()
        else:
            self._empty.set()


class LoadShare:
    """One sequence's part of a replica's load."""

    __slots__ = ("_began", "_load", "_over", "_prompt_tokens", "_uncached_tokens")

    def __init__(self, load: Load, uncached_tokens: int, prompt_tokens: int) -> None:
        self._load = load
        self._uncached_tokens = uncached_tokens
        self._prompt_tokens = prompt_tokens
        self._began = False
        self._over = False

    def begin(self) -> None:
        """Its prompt is computed. Idempotent."""
        if not self._began and not self._over:
            self._began = True
            self._load._change(-self._uncached_tokens, -1, 1, self._prompt_tokens)

    def end(self) -> None:
        """It is there no longer. Idempotent."""
        if self._over:
            return
        self._over = True
        if self._began:
            self._load._change(0, 0, -1, -self._prompt_tokens)
        else:
            self._load._change(-self._uncached_tokens, -1, 0, 0)
