"""The other gateways: who is alive, and what they have under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.news.fleet_news import NO_LOAD, OwnLoad

SILENCE_S = 1.5
"""A gateway that says nothing for so long is taken for dead."""


@dataclass(slots=True)
class _Peer:
    heard_s: float
    loads: Mapping[str, OwnLoad]


class Peers:
    """The latest word of each other gateway. Time is an argument, in seconds of one clock."""

    def __init__(self) -> None:
        self._peers: dict[bytes, _Peer] = {}
        self._sums: dict[str, OwnLoad] = {}
        self._stale = False
        self._next_look_s = float("inf")  # nobody has been silent for too long before

    def hear(self, gateway: bytes, loads: Mapping[str, OwnLoad], now_s: float) -> None:
        """A gateway is alive and has this under way, and nothing else."""
        self._peers[gateway] = _Peer(now_s, loads)
        self._next_look_s = min(self._next_look_s, now_s + SILENCE_S)
        self._stale = True

    def leave(self, gateway: bytes) -> None:
        """It has said that it ends."""
        if self._peers.pop(gateway, None) is not None:
            self._stale = True

    def live(self, now_s: float) -> int:
        """How many others are alive."""
        self._drop_silent(now_s)
        return len(self._peers)

    def foreign(self, replica: str, now_s: float) -> OwnLoad:
        """What they have under way on a replica. A lookup, unless there was news since the last."""
        if self._stale or now_s >= self._next_look_s:
            self._drop_silent(now_s)
            self._sums = self._summed()
            self._stale = False
        return self._sums.get(replica, NO_LOAD)

    def _drop_silent(self, now_s: float) -> None:
        if now_s < self._next_look_s:
            return
        for gateway, peer in list(self._peers.items()):
            if now_s - peer.heard_s >= SILENCE_S:
                self.leave(gateway)
        heard = (peer.heard_s + SILENCE_S for peer in self._peers.values())
        self._next_look_s = min(heard, default=float("inf"))

    def _summed(self) -> dict[str, OwnLoad]:
        sums: dict[str, OwnLoad] = {}
        for peer in self._peers.values():
            for replica, load in peer.loads.items():
                known = sums.get(replica, NO_LOAD)
                sums[replica] = OwnLoad(*(a + b for a, b in zip(known, load, strict=True)))
        return sums
