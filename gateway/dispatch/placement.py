"""A request at a replica, from being sent there to its end."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import Generic, Protocol

from gateway.dispatch.member import Member, ReplicaT_co
from gateway.dispatch.receipt import Receipt


class Bookkeeper(Protocol):
    """Who keeps account of what was sent where, and of what came of it. `links` are those of the
    prompt's blocks in the size of the replica's."""

    def note_sent(self, receipt: Receipt, links: Sequence[bytes]) -> None:
        """It is being sent."""
        ...

    def note_answer(self, receipt: Receipt, began_s: float) -> None:
        """Its first token has come."""
        ...

    def note_served(
        self, receipt: Receipt, links: Sequence[bytes], cached_tokens: int, now_s: float
    ) -> None:
        """So many of its prompt's tokens, in the unit of the links, came from the cache."""
        ...


class Placement(Generic[ReplicaT_co]):
    """A scope, in which the request counts at the replica."""

    __slots__ = ("_books", "_links", "_probing", "_share", "member", "receipt")

    def __init__(
        self,
        books: Bookkeeper,
        member: Member[ReplicaT_co],
        receipt: Receipt,
        links: Sequence[bytes],
    ) -> None:
        """`links` are those of the prompt's blocks in the size of the member's."""
        request, cached = receipt.request, receipt.candidate.cached
        uncached = max(1, request.prompt_tokens - cached.tokens)
        self.member = member
        self.receipt = receipt
        self._books = books
        self._links = links
        self._probing = False
        self._share = member.load.share(
            uncached, request.prompt_tokens, request.priority, request.flow, request.weight
        )

    def __enter__(self) -> Placement[ReplicaT_co]:
        breaker = self.member.breaker
        self._probing = not breaker.closed and breaker.start_probe(monotonic())
        self._share.__enter__()
        try:
            self._books.note_sent(self.receipt, self._links)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._share.end()
        if self._probing and self.receipt.began_s is None and self.receipt.lost is None:
            # the probe told nothing: its client left first
            self.member.breaker.probe_failed(monotonic())

    @property
    def replica(self) -> ReplicaT_co:
        """Where it runs."""
        return self.member.replica

    def began(self, served_tokens: int | None) -> None:
        """Its first token has come; so many of its prompt's tokens came from the cache (None: the
        replica does not say). Idempotent."""
        receipt = self.receipt
        if receipt.began_s is not None:
            return
        began_s = receipt.began_s = monotonic()
        receipt.served_tokens = served_tokens
        self._share.begin()
        self.member.answered()
        self._books.note_answer(receipt, began_s)
        if served_tokens is not None:
            self._books.note_served(receipt, self._links, served_tokens, began_s)

    def served(self, cached_tokens: int, in_links: int) -> None:
        """It has turned out, after it began, that so many of its prompt's tokens came from the
        cache; they are `in_links` tokens in the unit of the prefix's links."""
        self.receipt.served_tokens = cached_tokens
        self._books.note_served(self.receipt, self._links, in_links, monotonic())

    def presumed_begun(self) -> None:
        """It runs by now, as was predicted; nobody will say when it began. Idempotent."""
        self._share.begin()

    def answered(self, tokens: int) -> None:
        """So many tokens were generated there, in all; said before it ends, or never."""
        self._share.answered(tokens)

    def lost(self, why: str) -> None:
        """The replica has lost it, or did not take it."""
        self.receipt.lost = why
        self.member.failed()
