"""Which steps give way to a request that has just come, and how far."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from engine.executors.base import Executor, PausableExecutor
from engine.request import EngineRequest
from engine.scheduler import Chunk

_LEAST_TOKENS = 32
"""A step with fewer tokens of prompts is through about as soon as another one would have begun."""
_STEPS_BESIDE = 4


@dataclass(slots=True)
class Allowance:
    """What may still run beside a step that has been put aside, all its pauses together.

    So many tokens as a step has, in a few steps: whoever is in the step that was put aside waits
    about twice as long for it, and not longer. A pause in which nothing could run counts as a step
    of no tokens: however many come, they cannot stop it at every op.
    """

    tokens: int
    steps: int = _STEPS_BESIDE

    @property
    def spent(self) -> bool:
        """Whether the step must go on undisturbed."""
        return self.tokens <= 0 or self.steps <= 0

    def take(self, tokens: int) -> None:
        """A step of so many tokens has run."""
        self.tokens -= tokens
        self.steps -= 1


def gives_way_to(chunks: Ordered[Chunk]) -> int | None:
    """Requests with a priority below this one, which is that of the most urgent prompt in the step,
    need not wait until it is over; None if everybody does."""
    prompts = [each for each in chunks if each.sequence.known - each.sequence.computed > 1]
    if sum(chunk.tokens for chunk in prompts) < _LEAST_TOKENS:
        return None
    return min(chunk.sequence.rank.priority for chunk in prompts)


class Pauses:
    """Has the step that runs paused when somebody more urgent comes.

    Its owner's lock guards every call: so a request is either among those that `allow` looks at, or
    comes while the step can be paused.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor if isinstance(executor, PausableExecutor) else None
        self._priority: int | None = None

    @property
    def possible(self) -> bool:
        """Whether the executor can pause at all."""
        return self._executor is not None

    def allow(self, priority: int, here: Iterable[EngineRequest]) -> None:
        """From here on the step gives way to who comes with a lower priority than this, and to
        those who have come already: at once."""
        assert self._executor is not None
        self._executor.unpause()
        self._priority = priority
        for request in here:
            self.came(request)

    def forbid(self) -> None:
        """From here on it gives way to nobody."""
        if self._executor is not None:
            self._executor.unpause()
        self._priority = None

    def came(self, request: EngineRequest) -> None:
        """A request was submitted."""
        if self._priority is not None and request.priority < self._priority:
            assert self._executor is not None
            self._executor.pause()
            self._priority = None  # it is asked once
