"""A named prefix, and the record that gateways exchange about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cache.block import Owner
from gateway.wire.messages import Message


class Place(NamedTuple):
    """Where a name stands: under its tenant, and under one user where users are kept apart."""

    owner: Owner
    name: str


@dataclass(frozen=True, slots=True)
class NamedCache:
    """Messages that chats of one owner may begin with by name, kept warm until `expires_s`.

    `tokens` is the length of the messages as the model's template shows them, without the opening
    of an answer; `kv_bytes` what their full blocks take in one tier; `cached_tokens` how many were
    cached already when the prefix was last run. Times are Unix seconds.
    """

    place: Place
    model: str
    messages: tuple[Message, ...]
    tokens: int
    kv_bytes: int
    cached_tokens: int
    created_s: float
    expires_s: float

    def same_content(self, other: NamedCache) -> bool:
        """Whether both stand for the same prefix of the same model."""
        return self.model == other.model and self.messages == other.messages


@dataclass(frozen=True, slots=True)
class Record:
    """The last known change of one name: `cache` as it then was, or None once it was deleted.

    A deletion is remembered until the cache would have expired: a gateway that has not heard of it
    would otherwise bring the cache back.
    """

    place: Place
    changed_s: float
    expires_s: float
    cache: NamedCache | None

    def outdoes(self, other: Record) -> bool:
        """Whether this is the later change; a deletion wins a tie, so that every gateway agrees."""
        mine = (self.changed_s, self.cache is None, self.expires_s)
        return mine > (other.changed_s, other.cache is None, other.expires_s)


def stored(cache: NamedCache, now_s: float, before: Record | None) -> Record:
    """The record of a cache that is new or has changed, after `before`."""
    return Record(cache.place, _after(now_s, before), cache.expires_s, cache)


def deleted(before: Record, now_s: float) -> Record:
    """The record of a deletion."""
    return Record(before.place, _after(now_s, before), before.expires_s, None)


def _after(now_s: float, before: Record | None) -> float:
    """Now, but later than the change before, whatever another gateway's clock said."""
    return now_s if before is None else max(now_s, before.changed_s + 1e-3)
