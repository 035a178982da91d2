"""A fetch under way: what Redis replied for each block, verified and copied, or why not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from cache.block import BlockKey
from cache.envelope import Corrupt, Envelope, Foreign
from cache.redis_client import Command
from cache.redis_report import Fetched, Question
from cache.report import Miss

_DELETE_IF_SAME = (
    b"if redis.sha1hex(redis.call('GET', KEYS[1]) or '') == ARGV[1] "
    b"then return redis.call('UNLINK', KEYS[1]) else return 0 end"
)
_DELETE_UNLESS_SIZED = (
    b"if redis.pcall('STRLEN', KEYS[1]) ~= tonumber(ARGV[1]) "
    b"then return redis.call('UNLINK', KEYS[1]) else return 0 end"
)
_LENGTHEN_IF_SIZED = (
    b"if redis.pcall('STRLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end "
    b"if redis.call('TTL', KEYS[1]) < tonumber(ARGV[2]) "
    b"then redis.call('EXPIRE', KEYS[1], ARGV[2]) end return 1"
)


class Load:
    """One fetch under way: its blocks, and what became of the first ones so far."""

    def __init__(
        self,
        envelope: Envelope,
        blocks: Sequence[tuple[BlockKey, memoryview]],
        question: Question[Fetched],
        part: Callable[[int], None] | None,
    ) -> None:
        self.blocks = blocks
        self.reason = Miss.LATE
        """Why the blocks without an outcome have not arrived."""
        self._envelope = envelope
        self._question = question
        self._part = part
        self._outcomes: list[Miss | None] = []
        self._whole = True

    @property
    def position(self) -> int:
        """Index of the block that the next reply is for."""
        return len(self._outcomes)

    def take(self, value: Any) -> Miss | None:
        """Verify and copy Redis's reply for the next block; returns the block's outcome."""
        outcome = self._opened(*self.blocks[len(self._outcomes)], value)
        self._outcomes.append(outcome)
        self._whole = self._whole and outcome is None
        if self._whole and self._part is not None:
            self._part(len(self._outcomes))
        return outcome

    def finish(self, seconds: float) -> None:
        missing = len(self.blocks) - len(self._outcomes)
        self._question.answer(Fetched((*self._outcomes, *[self.reason] * missing), seconds))

    def _opened(self, key: BlockKey, buffer: memoryview, value: Any) -> Miss | None:
        if value is None:
            return Miss.EVICTED
        if not isinstance(value, bytes):
            return Miss.FOREIGN
        with self._question.lock:
            if self._question.settled:
                return Miss.TIER_DOWN
            try:
                self._envelope.open(key, value, buffer)
            except Corrupt:
                return Miss.CORRUPT
            except Foreign:
                return Miss.FOREIGN
        return None


def is_other_type(reply: ResponseError) -> bool:
    """The key holds something that is not a string."""
    return str(reply).startswith("WRONGTYPE")


def deletion(key: Any, value: Any) -> Command:
    """A command that deletes `key` if it still holds `value`; of another type, in any case."""
    if isinstance(value, bytes):
        return ("EVAL", _DELETE_IF_SAME, 1, key, hashlib.sha1(value).hexdigest())
    return ("UNLINK", key)


def deletion_unless_sized(key: Any, value_bytes: int) -> Command:
    """A command that deletes `key` unless it holds a string of this size by now."""
    return ("EVAL", _DELETE_UNLESS_SIZED, 1, key, value_bytes)


def lengthening(key: Any, value_bytes: int, life_s: int) -> Command:
    """A command that lets `key` live for `life_s` at least, if it holds a string of this size; its
    reply is 1 then, else 0."""
    return ("EVAL", _LENGTHEN_IF_SIZED, 1, key, value_bytes, life_s)
