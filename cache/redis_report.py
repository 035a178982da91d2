"""Answers of the Redis tier, and its counters."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cache.report import Miss

_log = logging.getLogger("forebay.cache")


@dataclass(frozen=True, slots=True)
class Probe:
    """Which of the asked blocks Redis has, in their order; or why that is not known. `damaged` are
    the indexes of those that it has not, but something of another size or type in their place;
    `foreign` of those that are sealed and should not be, or the other way round."""

    present: tuple[bool, ...] = ()
    damaged: frozenset[int] = frozenset()
    foreign: frozenset[int] = frozenset()
    failed: Miss | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of each asked block, in their order: None if it was loaded. `seconds` is from
    the question to the answer."""

    outcomes: tuple[Miss | None, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class RedisCounters:
    """One model's traffic with Redis since start, and what is known of the server.

    `hits` and `misses` count blocks of fetches; a probe's answers are not in them. `dropped` counts
    stores that did not happen: busy, quota, too_big, refused, error. `census_bytes` is what
    this model's blocks take, by tenant tag, and approximate.
    """

    hits: int
    misses: Mapping[Miss, int]
    stores: int
    dropped: Mapping[str, int]
    load_s: float
    loaded_bytes: int
    stored_bytes: int
    census_bytes: Mapping[bytes, int]
    up: bool
    times_opened: int
    server_version: str
    maxmemory_policy: str


@dataclass(slots=True)
class Traffic:
    """The counters behind `RedisCounters`. Every thread that changes or reads them holds `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    hits: int = 0
    misses: Counter[Miss] = field(default_factory=Counter)
    stores: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    load_s: float = 0.0

    def fetched(self, outcomes: Sequence[Miss | None], seconds: float) -> None:
        with self.lock:
            for outcome in outcomes:
                if outcome is None:
                    self.hits += 1
                else:
                    self.misses[outcome] += 1
            self.load_s += seconds

    def stored(self, blocks: int) -> None:
        with self.lock:
            self.stores += blocks

    def drop(self, reason: str, blocks: int = 1) -> None:
        if blocks:
            with self.lock:
                self.dropped[reason] += blocks


Answer = TypeVar("Answer")


class Question(Generic[Answer]):
    """A callback that is called exactly once, whatever happens first: the answer, a failure, or the
    store's end. Thread-safe.

    Whoever writes into the asker's buffers holds `lock` and looks at `settled` first: after the
    callback the buffers are the asker's again.
    """

    def __init__(
        self, done: Callable[[Answer], None], if_lost: Callable[[], Answer], book: Book
    ) -> None:
        self.lock = threading.Lock()
        self.settled = False
        self._done = done
        self._if_lost = if_lost
        self._book = book
        book.add(self)

    def answer(self, answer: Answer) -> None:
        """Call back, unless that was done before."""
        with self.lock:
            if self.settled:
                return
            self.settled = True
        self._book.remove(self)
        try:
            self._done(answer)
        except Exception:  # noqa: BLE001  # the asker's; it must not end the thread
            _log.exception("a callback of the Redis tier failed")

    def lose(self) -> None:
        """Call back with what is true when Redis does not answer, unless that was done before."""
        if not self.settled:
            self.answer(self._if_lost())


class Book:
    """The questions that are open. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Question[object]] = set()

    def add(self, question: Question[Answer]) -> None:
        with self._lock:
            self._open.add(question)  # type: ignore[arg-type]  # only lost, never answered, here

    def remove(self, question: Question[Answer]) -> None:
        with self._lock:
            self._open.discard(question)

    def lose_all(self) -> None:
        with self._lock:
            remaining = list(self._open)
        for question in remaining:
            question.lose()
