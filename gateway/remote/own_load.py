"""How many of this gateway's requests are at one server elsewhere.

What the server says of its load has them in it, and they are counted here already.
"""

from __future__ import annotations

from typing import Literal

_MEAN_SHARE = 0.05
"""Of the newest prompt in the running mean."""


class OwnLoad:
    """Requests that have been sent there and are not over, by whether their first token has come;
    how many tokens their prompts have, in the mean."""

    __slots__ = ("mean_prompt_tokens", "running", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.running = 0
        self.mean_prompt_tokens = 0.0


class OwnRequest:
    """One of them: counted as waiting from `start` on, as running from its first token on, and not
    at all after `end`, which is idempotent."""

    __slots__ = ("_load", "_state")

    def __init__(self, load: OwnLoad) -> None:
        self._load = load
        self._state: Literal["", "waiting", "running"] = ""

    def start(self, prompt_tokens: int) -> None:
        """It is being sent."""
        load = self._load
        load.mean_prompt_tokens += _MEAN_SHARE * (prompt_tokens - load.mean_prompt_tokens)
        load.waiting += 1
        self._state = "waiting"

    def begin(self) -> None:
        """Its first token has come."""
        if self._state == "waiting":
            self._load.waiting -= 1
            self._load.running += 1
            self._state = "running"

    def end(self) -> None:
        """It is there no longer."""
        if self._state == "waiting":
            self._load.waiting -= 1
        elif self._state == "running":
            self._load.running -= 1
        self._state = ""
