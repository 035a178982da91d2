"""`cache_control` on messages and their text parts: up to where, and how long, to keep a prompt.

Anthropic's notation: `{"type": "ephemeral", "ttl": "5m" | "1h"}`, five minutes if left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.wire.fields import Fields

MAX_BREAKPOINTS = 4
_NAME = "cache_control"
_DEFAULT_TTL = "5m"
_TTL_S = {"5m": 300, "1h": 3600}
_DURABLE_FROM_S = 3600


class Ttl(NamedTuple):
    """How long to keep, and whether that outlives the process."""

    seconds: int
    durable: bool


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Keep the prompt up to the end of a part for `ttl`: message `message` with the first
    `characters` of its content, None for the whole message."""

    message: int
    characters: int | None
    ttl: Ttl


@dataclass(slots=True)
class CacheControls:
    """Collects the breakpoints of one body, in its order, and the unknown fields in them."""

    breakpoints: list[Breakpoint] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    def read(self, owner: Fields, message: int, characters: int | None) -> None:
        """Take in the `cache_control` of a message or part, if it has one; raises a 400 that names
        what is wrong with it, or that it is one too many."""
        control = owner.object(_NAME)
        if control is None:
            return
        if control.required_string("type") != "ephemeral":
            raise control.wrong("type", "must be ephemeral.")
        ttl = control.string("ttl")
        seconds = _TTL_S.get(_DEFAULT_TTL if ttl is None else ttl)
        if seconds is None:
            raise control.wrong("ttl", "must be 5m or 1h.")
        if len(self.breakpoints) == MAX_BREAKPOINTS:
            raise owner.wrong(_NAME, f"is one too many: a request may have {MAX_BREAKPOINTS}.")
        keep = Ttl(seconds, durable=seconds >= _DURABLE_FROM_S)
        self.breakpoints.append(Breakpoint(message, characters, keep))
        self.unknown.update(control.unread())
