"""What was set aside for one request, in its scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Self

from gateway.http_call import Header
from gateway.limits.answers import limit_headers
from policies.limit_account import Holding
from policies.limit_book import LimitBook
from policies.limit_standing import Ceiling, Standing


class Unlimited:
    """Of a request that nothing limits."""

    __slots__ = ()

    @property
    def headers(self) -> list[Header]:
        """None."""
        return []

    def settle(self, tokens: int, cost_nusd: int) -> None:
        """Counted nowhere."""

    def __enter__(self) -> Unlimited:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


UNLIMITED = Unlimited()


class BookReservation:
    """A holding in this gateway's book."""

    __slots__ = ("_book", "_ceilings", "_clock", "_degraded", "_standings", "holding")

    def __init__(
        self,
        book: LimitBook,
        holding: Holding,
        ceilings: Sequence[Ceiling],
        standings: Sequence[Standing],
        *,
        degraded: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`standings` are with the request counted."""
        self.holding = holding
        self._book = book
        self._ceilings = ceilings
        self._standings = standings
        self._degraded = degraded
        self._clock = clock

    @property
    def headers(self) -> list[Header]:
        """As they stood when the request was let in."""
        return limit_headers(self._ceilings, self._standings, degraded=self._degraded)

    def settle(self, tokens: int, cost_nusd: int) -> None:
        """What was used; the first call counts."""
        self._book.settle(self.holding, tokens, cost_nusd)

    def release(self) -> None:
        """The request is over. Idempotent."""
        self._book.release(self.holding, self._clock())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
