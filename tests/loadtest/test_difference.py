"""Differences and noise: how often each is taken for the other, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.comparison import Attempt, Comparison
from loadtest.difference import Difference, Judgement, difference, judged
from loadtest.metrics import METRICS

SHOWN = (Judgement.BETTER, Judgement.WORSE)


def between(metric: str, theirs: list[float | None], mine: list[float | None]) -> Difference:
    """B beside A, judged by itself."""
    figures, beside = dict(enumerate(mine)), dict(enumerate(theirs))
    return judged([difference(metric, "B", "A", figures, beside)])[0]


def made_up(
    random: np.random.Generator, rounds: int, noise: float, effect: float = 1.0
) -> Comparison:
    """All metrics of two contenders with that noise in each figure, and a drift of all by a
    quarter; B's are `effect` times A's."""
    drift = np.linspace(1.0, 1.25, 2 * rounds)
    attempts = []
    for at in range(2 * rounds):
        name = "ABBA"[at % 4]
        level = 100 * drift[at] * (effect if name == "B" else 1.0)
        values: dict[str, float | None] = {
            metric: level * float(np.exp(random.normal(0, noise))) for metric in METRICS
        }
        attempts.append(Attempt(name, at // 2 + 1, at % 2 + 1, 0, values))
    return Comparison.of(("A", "B"), attempts, seed=0, headline="TTFT p95")


def test_equals_are_called_different_as_seldom_as_promised() -> None:
    random, trials, main, rest = np.random.default_rng(3), 200, 0, 0
    for _ in range(trials):
        first, *others = made_up(random, rounds=6, noise=0.1).differences
        main += first.judgement in SHOWN
        rest += any(one.judgement in SHOWN for one in others)

    # Of 200 with a probability of 5 % each, 19 are three deviations above the mean.
    assert main <= 19
    assert rest <= 19


def test_a_difference_of_ten_percent_is_found_in_noise_of_three() -> None:
    random, judgements = np.random.default_rng(4), []
    for _ in range(50):
        first, *_ = made_up(random, rounds=8, noise=0.03, effect=1.1).differences
        judgements.append(first.judgement)

    assert judgements.count(Judgement.WORSE) >= 47
    assert Judgement.BETTER not in judgements


def test_many_metrics_are_judged_more_strictly_than_the_one_chosen_before() -> None:
    # p is about 0.02 for each.
    pairs: tuple[list[float | None], list[float | None]] = (
        [100.0, 100.0, 100.0, 100.0],
        [110.0, 120.0, 112.0, 104.0],
    )
    alone = between("TTFT p50", *pairs)
    figures, beside = dict(enumerate(pairs[1])), dict(enumerate(pairs[0]))
    many = judged([difference(name, "B", "A", figures, beside) for name in list(METRICS)[:5]])

    assert alone.judgement is Judgement.WORSE
    assert {one.judgement for one in many} == {Judgement.NONE}
    assert str(many[0]) == (
        "B's TTFT p50: no difference from A's that 4 rounds can show: 1.01–1.22×, "
        "which among so many metrics may be chance"
    )


@pytest.mark.parametrize(
    ("metric", "theirs", "mine", "said"),
    [
        (
            "TTFT p95",
            [140.0, 150.0, 144.0],
            [100.0, 104.0, 102.0],
            "B's TTFT p95 is 1.42× lower (1.36–1.47) than A's: better",
        ),
        (
            "output",
            [140.0, 150.0, 144.0],
            [100.0, 104.0, 102.0],
            "B's output is 1.42× lower (1.36–1.47) than A's: worse",
        ),
        (
            "TPOT p50",
            [10.0, 10.4, 9.8],
            [10.2, 10.1, 9.9],
            "B's TPOT p50: no difference from A's that 3 rounds can show: 0.94–1.07×",
        ),
        (
            "cached share",
            [30.0, 31.0, 30.5],
            [36.0, 37.2, 36.3],
            "B's cached share is 6.00 points higher (5.50–6.50) than A's: better",
        ),
        (
            "cached share",
            [30.0, 31.0, 30.5],
            [30.2, 30.7, 30.9],
            "B's cached share: no difference from A's that 3 rounds can show: "
            "-0.80 to +1.00 points",
        ),
        (
            "goodput",
            [0.0, 0.0, 0.0],
            [2.0, 2.1, 2.2],
            "B's goodput is 2.10 requests/s higher (1.85–2.35) than A's: better",
        ),
        ("error share", [0.0] * 3, [0.0] * 3, "B's error share is the same as A's in all 3 rounds"),
        ("TTFT p50", [1.0], [2.0], "B's TTFT p50: 1 round of both, at least 3 give an interval"),
        ("cached share", [None] * 3, [1.0] * 3, "B's cached share: not known in any round "),
    ],
)
def test_what_is_said(
    metric: str, theirs: list[float | None], mine: list[float | None], said: str
) -> None:
    assert str(between(metric, theirs, mine)).startswith(said)


def test_only_rounds_that_have_both_are_pairs() -> None:
    found = between("TTFT p50", [100.0, None, 100.0, 100.0], [50.0, 50.0, None, 25.0])

    assert found.estimate is not None
    assert found.estimate.pairs == 2
    assert found.estimate.value == pytest.approx(8**-0.5)
    assert found.median == 50.0
    assert found.cell() == "0.35×"
    assert found.judgement is Judgement.UNKNOWN


@pytest.mark.parametrize(
    ("metric", "mine", "said"),
    [
        ("TTFT p50", [100.2, 100.3, 100.2], "is within 1 % of A's: 1.00–1.00×"),
        ("cached share", [100.2, 100.2, 100.3], "is within half a point of A's"),
    ],
)
def test_a_difference_that_is_surely_a_trifle_is_none(
    metric: str, mine: list[float | None], said: str
) -> None:
    found = between(metric, [100.0, 100.0, 100.0], mine)
    assert not found.noise
    assert found.judgement is Judgement.NONE
    assert said in str(found)
    assert found.cell().endswith("same")
    assert between(metric, [100.0, 100.0, 100.0], [103.0, 103.1, 103.0]).judgement in SHOWN
