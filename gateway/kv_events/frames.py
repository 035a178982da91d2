"""ZeroMQ frames of a vLLM's event publisher: topic, number (8 bytes, big-endian), payload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_NUMBER_BYTES = 8
_END = (1 << 64) - 1
"""The number of what ends a replay: -1."""


class Numbered(NamedTuple):
    """One message. `ends_replay`: it is none, but says that no more will come."""

    number: int
    payload: bytes

    @property
    def ends_replay(self) -> bool:
        return self.number == _END


def published(frames: Sequence[bytes]) -> Numbered | None:
    """A message as it is published; None if it is something else."""
    return _numbered(frames[1:]) if len(frames) == 3 else None


def replayed(frames: Sequence[bytes]) -> Numbered | None:
    """A message as it answers a request: behind an empty frame, in some versions with the topic;
    None if it is something else."""
    return _numbered(frames[-2:]) if len(frames) in (3, 4) and not frames[0] else None


def request(first: int) -> list[bytes]:
    """Asks for all messages from this number on that are still kept."""
    return [b"", first.to_bytes(_NUMBER_BYTES, "big")]


def _numbered(frames: Sequence[bytes]) -> Numbered | None:
    number, payload = frames
    if len(number) != _NUMBER_BYTES:
        return None
    return Numbered(int.from_bytes(number, "big"), payload)
