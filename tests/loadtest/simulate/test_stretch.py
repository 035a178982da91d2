from __future__ import annotations

from random import Random

import pytest

from loadtest.simulate.stretch import Stretch


def test_it_is_as_long_as_its_steps_one_by_one() -> None:
    random = Random(3)
    for _ in range(50):
        first_s, growth_s = random.uniform(1e-3, 1.0), random.choice((0.0, random.uniform(0, 0.1)))
        stretch = Stretch(random.uniform(0, 9), random.randint(1, 60), first_s, growth_s)
        ends_s, now_s = [], stretch.began_s
        for step in range(stretch.steps):
            now_s += first_s + step * growth_s
            ends_s.append(now_s)
        assert stretch.end_s(stretch.steps) == pytest.approx(ends_s[-1])
        # who comes in the middle of a step waits for its end
        for step, end_s in enumerate(ends_s, start=1):
            assert stretch.steps_until(end_s - 0.4 * first_s) == step


def test_it_has_one_step_at_least_and_no_more_than_it_has() -> None:
    stretch = Stretch(2.0, 5, 0.1, 0.01)
    assert stretch.steps_until(2.0) == 1
    assert stretch.steps_until(99.0) == 5
