"""How many tokens of which sequence a step computes.

Every running stream gets its token first. Prompts share what is left of the step's tokens in their
order, as far as the step then takes no longer than the tightest `tpot_s` among those streams.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

from policies.cost import StepShape

_OF_TARGET = 0.9
"""Of a target, so much may be predicted to go into the step: the rest is for what comes between two
steps, and for predictions that are wrong."""
_LEAST_SHARE = 8
"""Where the streams alone miss their target, prompts still get one part in so many of the step."""


class Streams(NamedTuple):
    """Those that take one token in the step: how many, the sum of their contexts with these tokens
    included, and the least of their targets between two tokens, None without any.

    A target is one on the mean over an answer. Those who are ahead of it can wait: `patience_s` is
    the time from now until the first of them would be behind."""

    sequences: int
    context_tokens: int
    tpot_s: float | None = None
    patience_s: float = 0.0


class StepBudget:
    """What a step of at most `tokens` has beside `streams`; `step_s` predicts what a step takes.

    Without a target, prompts get all that is left. With one, they get what fits, and at least one
    block (`block_tokens`) in all, so that they move. If the streams miss it even alone, which
    smaller prefills cannot mend, that is an eighth of the step.
    """

    __slots__ = (
        "_attended",
        "_block_tokens",
        "_context_read",
        "_goal_s",
        "_least",
        "_other_steps_s",
        "_patience_s",
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
        self._goal_s = None if streams.tpot_s is None else _OF_TARGET * streams.tpot_s
        self._least: int | None = None
        self._other_steps_s = 0.0
        self._patience_s = streams.patience_s
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
            alone_s = self._predict_s(0, 0)
            least = self._block_tokens
            if alone_s > self._goal_s:
                least = max(least, self._tokens // _LEAST_SHARE)
            self._least = least
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

    def further(self, tokens: int) -> StepBudget:
        """Of a further step, of at most `tokens`, that the same streams wait for as well: it has
        what this one leaves of their target, or of their patience if that is more, and costs what
        any step does.

        A step of its own may use up what streams are ahead, one that prompts fill may not: prompts
        that go on for long would leave nothing of it for who comes in the middle.
        """
        budget = copy(self)
        if budget._goal_s is not None:
            budget._goal_s = max(budget._goal_s, _OF_TARGET * self._patience_s)
        budget._tokens += tokens - self.left
        budget.left = tokens
        budget._other_steps_s += self._step_s(StepShape(0, 0, 0, 0))
        return budget

    def _predict_s(self, tokens: int, computed: int) -> float:
        """The step with that many more tokens of one more prompt, and what ran besides."""
        return self._other_steps_s + self._step_s(
            StepShape(
                self._tokens - self.left + tokens,
                self._sequences + (tokens > 0),
                self._attended + _attended(tokens, computed),
                self._context_read + computed + tokens,
            )
        )


def _attended(tokens: int, computed: int) -> int:
    return tokens * computed + tokens * (tokens + 1) // 2
