"""Requests and tokens of the last minute, in sub-buckets.

A bucket counts until all of it is older than the span. So no span of that length ever holds more
than was allowed, wherever it begins, and what was used is given back up to one bucket's width late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowShape:
    """A span and the number of buckets that it is cut into. Raises ValueError unless it can be."""

    span_us: int = 60_000_000
    buckets: int = 60

    def __post_init__(self) -> None:
        if self.buckets < 1 or self.span_us < self.buckets or self.span_us % self.buckets:
            raise ValueError("the span must be a whole number of microseconds per bucket")

    @property
    def width_us(self) -> int:
        """Of one bucket, which is also how much longer than the span something may count."""
        return self.span_us // self.buckets

    def bucket(self, now_s: float) -> int:
        """The bucket that a moment falls into."""
        return int(now_s * 1e6) // self.width_us

    def gone_s(self, bucket: int) -> float:
        """From when on a bucket counts no more."""
        return (bucket + 1 + self.buckets) * self.width_us / 1e6


class Window:
    """One account's buckets. Counts are never negative as long as nobody takes back more than was
    added. The memory is fixed."""

    __slots__ = ("_newest", "_requests", "_size", "_tokens", "requests", "tokens")

    def __init__(self, shape: WindowShape, bucket: int) -> None:
        """`bucket` is that of now."""
        self._size = shape.buckets + 1
        self._newest = bucket
        self._requests = [0] * self._size
        self._tokens = [0] * self._size
        self.requests = 0
        self.tokens = 0

    @property
    def empty(self) -> bool:
        """Whether nothing counts."""
        return not (self.requests or self.tokens)

    def slide(self, bucket: int) -> None:
        """It is `bucket` now; what is too old for that counts no more. Never goes back."""
        newest = self._newest
        if bucket <= newest:
            return
        self._newest = bucket
        if self.empty:
            return
        size, requests, tokens = self._size, self._requests, self._tokens
        for passed in range(newest + 1, min(bucket, newest + size) + 1):
            slot = passed % size
            self.requests -= requests[slot]
            self.tokens -= tokens[slot]
            requests[slot] = tokens[slot] = 0

    def add(self, bucket: int, requests: int, tokens: int) -> None:
        """Count, or with negative numbers take back; nothing if that bucket counts no more."""
        if bucket > self._newest:
            self.slide(bucket)
        elif bucket <= self._newest - self._size:
            return
        slot = bucket % self._size
        self._requests[slot] += requests
        self._tokens[slot] += tokens
        self.requests += requests
        self.tokens += tokens

    def content(self) -> Iterator[tuple[int, int, int]]:
        """Bucket, requests and tokens of all that is not zero, oldest first."""
        for bucket in range(self._newest - self._size + 1, self._newest + 1):
            slot = bucket % self._size
            if self._requests[slot] or self._tokens[slot]:
                yield bucket, self._requests[slot], self._tokens[slot]

    def newest_used(self) -> int | None:
        """The last bucket with anything in it."""
        return max((bucket for bucket, _, _ in self.content()), default=None)

    def bucket_freeing_requests(self, surplus: int) -> int | None:
        """The bucket with whose end at least `surplus` requests have gone; None: none does."""
        return _freeing(surplus, ((bucket, requests) for bucket, requests, _ in self.content()))

    def bucket_freeing_tokens(self, surplus: int) -> int | None:
        """The same for tokens."""
        return _freeing(surplus, ((bucket, tokens) for bucket, _, tokens in self.content()))


def _freeing(surplus: int, counts: Iterator[tuple[int, int]]) -> int | None:
    for bucket, count in counts:
        surplus -= count
        if surplus <= 0:
            return bucket
    return None
