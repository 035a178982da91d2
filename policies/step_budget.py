"""How many tokens of which sequence a step computes.

Every running stream gets its token first. Prompts share what is left of the step's tokens in their
order, as far as the step is then over when the first of those streams wants its next token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from policies.cost import StepShape

_OF_TIME = 0.9
"""Of the time that there is, so much may be predicted to go into the step: the rest is for what
comes between two steps, and for predictions that are wrong."""
_LEAST_SHARE = 8
"""Where the streams alone miss their target, prompts still get one part in so many of the step."""


class Streams(NamedTuple):
    """Those that take one token in the step: how many, and the sum of their contexts with these
    tokens included. `due_s` is the time from now until the first of them is to have its token, None
    if none has a target between two tokens. `late_s` is the time until it would be if none of them
    had anything to make up for, not before `due_s`; None: the same."""

    sequences: int
    context_tokens: int
    due_s: float | None = None
    late_s: float | None = None


class StepBudget:
    """What a step of at most `tokens` has beside `streams`; `step_s` predicts what a step takes.

    If no token is due, prompts get all that is left. Otherwise they get what fits, and at least one
    block (`block_tokens`) in all, so that they move. If the streams are late even alone, which
    smaller prefills cannot mend, that is an eighth of the step. Where they are so only because they
    make up for something, an eighth is the most, as far as it fits before they are late indeed: the
    step of who is behind is never longer than it would be if he were not.
    """

    __slots__ = (
        "_attended",
        "_block_tokens",
        "_context_read",
        "_goal_s",
        "_late_s",
        "_least",
        "_most",
        "_prefilled",
        "_sequences",
        "_step_s",
        "_tokens",
        "left",
    )

    def __init__(
        self,
        tokens: int,
        streams: Streams,
        block_tokens: int,
        step_s: Callable[[StepShape], float],
    ) -> None:
        self.left = tokens - streams.sequences
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._step_s = step_s
        self._goal_s = None if streams.due_s is None else _OF_TIME * streams.due_s
        self._late_s = streams.late_s
        self._least: int | None = None
        self._most: int | None = None  # of prompts, all together, whatever fits
        self._prefilled = 0
        self._sequences = streams.sequences
        self._attended = self._context_read = streams.context_tokens

    @property
    def has_room(self) -> bool:
        """Whether one more prompt could begin."""
        return self.prefill(1, 0) > 0

    def prefill(self, wanted: int, computed: int) -> int:
        """How many of `wanted` tokens behind `computed` a prompt may compute now."""
        wanted = min(wanted, self.left)
        if self._goal_s is None or wanted <= 0:
            return max(0, wanted)
        if self._least is None:
            self._least = self._block_tokens
            alone_s = self._predict_s(0, 0)
            if alone_s > self._goal_s:
                share = max(self._block_tokens, self._tokens // _LEAST_SHARE)
                if self._late_s is not None and alone_s <= _OF_TIME * self._late_s:
                    self._goal_s, self._most = _OF_TIME * self._late_s, share
                else:
                    self._least = share
        if self._most is not None:
            wanted = min(wanted, max(0, self._most - self._prefilled))
        least = min(wanted, max(0, self._least - self._prefilled))
        fits, beyond = least, wanted + 1
        if self._predict_s(wanted, computed) <= self._goal_s:
            return wanted
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            if self._predict_s(middle, computed) <= self._goal_s:
                fits = middle
            else:
                beyond = middle
        return fits

    def take(self, tokens: int, computed: int) -> None:
        """A prompt computes so many tokens behind `computed`."""
        self.left -= tokens
        self._prefilled += tokens
        self._sequences += 1
        self._attended += _attended(tokens, computed)
        self._context_read += computed + tokens

    def reaches(self, tokens: int, computed: int) -> bool:
        """Whether a prompt can compute all of these `tokens` behind `computed`."""
        return self.prefill(tokens, computed) == tokens

    def _predict_s(self, tokens: int, computed: int) -> float:
        """The step with that many more tokens of one more prompt."""
        return self._step_s(
            StepShape(
                self._tokens - self.left + tokens,
                self._sequences + (tokens > 0),
                self._attended + _attended(tokens, computed),
                self._context_read + computed + tokens,
            )
        )


def _attended(tokens: int, computed: int) -> int:
    return tokens * computed + tokens * (tokens + 1) // 2
