"""The seam: what a gateway tells the others about shared replicas, and what it hears of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol


class OwnLoad(NamedTuple):
    """What one gateway, or several together, have under way on a replica, with the meanings of
    `policies.routing.Standing`."""

    pending_tokens: int = 0
    waiting: int = 0
    running: int = 0
    context_tokens: int = 0


NO_LOAD = OwnLoad()

RoutedCallback = Callable[[str, Sequence[bytes]], None]
"""Called on the event loop with a replica's name and the links, from the first, of a prefix that
another gateway has sent there."""


class NewsCounts(NamedTuple):
    """Since the start. `told` and `dropped` count this gateway's decisions, `heard` the others'
    that were passed on, `unresolved` those of which the beginning was missed, `refused` messages
    that are damaged, of another version or sealed under another secret; `sent_bytes` is what Redis
    was given."""

    told: int = 0
    dropped: int = 0
    heard: int = 0
    unresolved: int = 0
    refused: int = 0
    sent_bytes: int = 0


class FleetNews(Protocol):
    """Event loop only. A replica has the same name at every gateway; those that belong to one
    gateway alone are not told of."""

    @property
    def gateways(self) -> int:
        """How many gateways are alive as far as is known here, this one included."""
        ...

    @property
    def degraded(self) -> bool:
        """Whether the others cannot be told or heard now."""
        ...

    @property
    def counts(self) -> NewsCounts:
        """What was told and heard."""
        ...

    def routed(self, replica: str, links: Sequence[bytes]) -> None:
        """A prompt was sent to `replica`: `links` are those of its full blocks, from the first, 16
        bytes each, always for the same block size of one replica. Never blocks or raises; what
        cannot be told in time is dropped, oldest first, and counted."""
        ...

    def loads(self, loads: Mapping[str, OwnLoad]) -> None:
        """All that this gateway has under way now, by replica; to be called whenever it changes.
        Never blocks or raises."""
        ...

    def foreign(self, replica: str, now_s: float) -> OwnLoad:
        """What the other live gateways have under way on a replica. `now_s` is `time.monotonic`;
        a gateway that is silent for `SILENCE_S` counts nothing."""
        ...


class LocalNews:
    """One gateway that has nobody to tell."""

    @property
    def gateways(self) -> int:
        """This one."""
        return 1

    @property
    def degraded(self) -> bool:
        """There is nothing to be without."""
        return False

    @property
    def counts(self) -> NewsCounts:
        """Nothing."""
        return NewsCounts()

    def routed(self, replica: str, links: Sequence[bytes]) -> None:
        """Nobody wants to know."""

    def loads(self, loads: Mapping[str, OwnLoad]) -> None:
        """Nobody wants to know."""

    def foreign(self, replica: str, now_s: float) -> OwnLoad:  # noqa: ARG002 - all alike
        """Nothing."""
        return NO_LOAD
