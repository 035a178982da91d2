"""Who falls behind: a queue that grows, and what only looks like one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loadtest.columns import Columns
from loadtest.record import Outcome, Record
from loadtest.stats.backlog import Backlog, falls_behind


def columns(sent_s: Sequence[float], ended_s: Sequence[float]) -> Columns:
    times = zip(sent_s, ended_s, strict=True)
    return Columns.of(
        Record(index, sent, sent, ended, Outcome.OK) for index, (sent, ended) in enumerate(times)
    )


def served_in_turn(rate: float, service_s: float, count: int, seed: int = 1) -> Columns:
    """Poisson arrivals at one server."""
    sent_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()
    free_s, ended_s = 0.0, []
    for at_s in sent_s:
        free_s = max(free_s, at_s) + service_s
        ended_s.append(free_s)
    return columns(sent_s, ended_s)


@pytest.mark.parametrize(("load", "behind"), [(0.5, False), (0.8, False), (1.3, True), (3.0, True)])
def test_a_queue_grows_when_more_comes_than_is_served(load: float, behind: bool) -> None:
    found = Backlog.of(served_in_turn(load * 10, 0.1, 500))

    assert found is not None
    assert falls_behind([found]) is behind


def test_what_is_open_is_counted_at_the_middle_and_at_the_end() -> None:
    # One a second, each takes 1.5 s, but for the last two that take ever so long.
    found = Backlog.of(columns(range(21), [at + 1.5 for at in range(19)] + [90.0, 99.0]))

    assert found == Backlog(sent=10, open_before=2, open_after=2)


def test_a_run_shorter_than_a_few_answers_says_nothing() -> None:
    sent_s = [at / 10 for at in range(50)]

    assert Backlog.of(columns(sent_s, [at + 4.0 for at in sent_s])) is None
    assert Backlog.of(columns([0.0], [1.0])) is None


def test_little_growth_is_none_until_several_runs_show_it() -> None:
    one = Backlog(sent=100, open_before=20, open_after=42)

    assert not falls_behind([one])
    assert falls_behind([one] * 20)
    assert not falls_behind([])
