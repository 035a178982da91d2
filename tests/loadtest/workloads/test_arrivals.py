"""Arrivals against what theory says of them."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile
from statistics import fmean, pstdev

import pytest

from loadtest.plan import Session, Turn
from loadtest.workloads.arrivals import Arrivals, Closed, Open, arrivals_of, with_arrivals
from loadtest.workloads.randomness import drawer
from loadtest.workloads.zipf import ZipfChoice, zipf_shares

_MANY = 20_000


@pytest.mark.parametrize(("rate", "cv"), [(4.0, 1.0), (0.5, 3.0), (10.0, 0.25)])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(rate: float, cv: float) -> None:
    times = list(islice(Open(rate, cv).times_s(seed=1), _MANY))

    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    # four standard errors of a mean
    assert fmean(gaps) == pytest.approx(1 / rate, rel=4 * cv / _MANY**0.5)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    per_second = [0] * 5000
    for at_s in takewhile(lambda at_s: at_s < len(per_second), Open(4.0).times_s(seed=2)):
        per_second[int(at_s)] += 1

    assert fmean(per_second) == pytest.approx(4.0, rel=0.05)
    assert pstdev(per_second) ** 2 == pytest.approx(4.0, rel=0.1)


def test_a_constant_rate_does_not_drift() -> None:
    times = list(islice(Open(3.0, 0.0).times_s(seed=1), 301))

    assert times[0] == 0.0
    assert times[300] == 100.0


def test_times_are_the_seeds() -> None:
    def first(seed: int) -> list[float]:
        return list(islice(Open(1.0).times_s(seed), 5))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_sessions_keep_their_order() -> None:
    sessions = [Session((Turn(1, tokens=[number]),)) for number in range(3)]

    placed = list(with_arrivals(sessions, Open(2.0, 0.0), seed=0))

    assert [session.start_s for session in placed] == [0.0, 0.5, 1.0]
    assert [session.turns for session in placed] == [session.turns for session in sessions]


@pytest.mark.parametrize(
    ("arrivals", "said"),
    [
        (arrivals_of("closed", concurrency=3), "3 at a time"),
        (arrivals_of("constant", rate=2), "2/s, at a constant rate"),
        (arrivals_of("poisson", rate=2.5), "2.5/s, Poisson"),
        (arrivals_of("gamma", rate=2, cv=3), "2/s, gamma, cv 3"),
    ],
)
def test_arrivals_say_what_they_are(arrivals: Arrivals, said: str) -> None:
    assert str(arrivals) == said


def test_options_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="rate is needed where arrivals are poisson"):
        arrivals_of("poisson")
    with pytest.raises(ValueError, match="cv is of no use where arrivals are constant"):
        arrivals_of("constant", rate=1, cv=1)
    with pytest.raises(ValueError, match="rate is of no use where arrivals are closed"):
        arrivals_of("closed", rate=1, concurrency=1)
    with pytest.raises(ValueError, match="no arrivals never; there are closed, constant"):
        arrivals_of("never")  # type: ignore[arg-type]  # what a command line might say


def test_impossible_arrivals_are_refused() -> None:
    with pytest.raises(ValueError, match="concurrency must be at least 1"):
        Closed(0)
    with pytest.raises(ValueError, match="rate must be more than 0"):
        Open(0.0)
    with pytest.raises(ValueError, match="cv must be at least 0"):
        Open(1.0, -1.0)


def test_zipf_shares_fall_as_a_power_of_the_rank() -> None:
    shares = zipf_shares(100, 1.2)

    assert sum(shares) == pytest.approx(1.0)
    assert shares[0] / shares[9] == pytest.approx(10**1.2)
    assert zipf_shares(4, 0.0) == (0.25,) * 4


def test_draws_keep_to_the_shares() -> None:
    choice = ZipfChoice(5, 1.0, drawer("zipf"))
    drawn = [choice.next() for _ in range(_MANY)]

    for rank, share in enumerate(zipf_shares(5, 1.0)):
        # four standard errors of a share
        error = (share * (1 - share) / _MANY) ** 0.5
        assert drawn.count(rank) / _MANY == pytest.approx(share, abs=4 * error)
