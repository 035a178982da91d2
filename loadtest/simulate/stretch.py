"""Steps in which only streams run: many at once, in closed form.

The cost model is linear in the context, and each such step adds a token of context to every stream.
So the times of the steps are an arithmetic progression.
"""

from __future__ import annotations

import math


class Stretch:
    """`steps` of them from `began_s` on, the first of which takes `first_s`, and each one
    `growth_s` longer than the one before."""

    __slots__ = ("began_s", "first_s", "growth_s", "steps")

    def __init__(self, began_s: float, steps: int, first_s: float, growth_s: float) -> None:
        self.began_s = began_s
        self.steps = steps
        self.first_s = first_s
        self.growth_s = growth_s

    def end_s(self, steps: int) -> float:
        """When so many of its steps are over."""
        return self.began_s + steps * self.first_s + 0.5 * self.growth_s * steps * (steps - 1)

    def steps_until(self, when_s: float) -> int:
        """How many of its steps are over at the end of the one that runs `when_s`: at least one,
        and not more than it has."""
        elapsed = when_s - self.began_s
        half, linear = 0.5 * self.growth_s, self.first_s - 0.5 * self.growth_s
        if half > 0:
            root = math.sqrt(linear * linear + 4 * half * max(0.0, elapsed))
            guess = math.ceil((root - linear) / (2 * half))
        else:
            guess = math.ceil(elapsed / self.first_s)
        guess = min(max(guess, 1), self.steps)
        # rounding may have put it one off
        while guess > 1 and self.end_s(guess - 1) >= when_s:
            guess -= 1
        while guess < self.steps and self.end_s(guess) < when_s:
            guess += 1
        return guess
