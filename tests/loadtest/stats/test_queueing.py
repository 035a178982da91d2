"""Waiting times from theory: worked numbers, and a queue that is simulated."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.stats.interval import bootstrap
from loadtest.stats.queueing import (
    erlang_c,
    md1_wait_s,
    mg1_wait_s,
    mm1_wait_s,
    mmc_wait_s,
    utilization,
)


def test_one_server_busy_for_four_fifths_of_its_time() -> None:
    # 0.8 / (1 - 0.8) = 4 services; half as long where all services take the same.
    assert utilization(8, 0.1) == pytest.approx(0.8)
    assert mm1_wait_s(8, 0.1) == pytest.approx(0.4)
    assert md1_wait_s(8, 0.1) == pytest.approx(0.2)
    # A deviation of twice the mean: what varies more waits longer.
    assert mg1_wait_s(8, 0.1, squared_variation=4) == pytest.approx(1.0)


def test_several_servers_with_one_line() -> None:
    assert erlang_c(0.8, 1) == pytest.approx(0.8)
    # Two servers: C = 2 rho^2 / (1 + rho), W = rho^2 / (1 - rho^2) services.
    assert erlang_c(1.6, 2) == pytest.approx(2 * 0.64 / 1.8)
    assert mmc_wait_s(16, 0.1, 2) == pytest.approx(0.64 / 0.36 * 0.1)
    assert mmc_wait_s(8, 0.1, 1) == pytest.approx(mm1_wait_s(8, 0.1))
    # A thousand servers: no overflow, and next to no waiting.
    assert 0 < mmc_wait_s(900, 1.0, 1000) < 0.001


def test_without_arrivals_nobody_waits() -> None:
    assert mm1_wait_s(0, 0.1) == md1_wait_s(0, 0.1) == mmc_wait_s(0, 0.1, 3) == 0


@pytest.mark.parametrize("arrivals_per_s", [10.0, 11.0])
def test_a_line_that_grows_for_ever_has_no_mean(arrivals_per_s: float) -> None:
    for wait in (mm1_wait_s, md1_wait_s):
        with pytest.raises(ValueError, match="grows for ever"):
            wait(arrivals_per_s, 0.1)
    with pytest.raises(ValueError, match="grows for ever"):
        mmc_wait_s(3 * arrivals_per_s, 0.1, 3)


def test_what_is_no_load_is_refused() -> None:
    with pytest.raises(ValueError, match="no load"):
        utilization(-1, 0.1)
    with pytest.raises(ValueError, match="at least one server"):
        utilization(1, 0.1, servers=0)
    with pytest.raises(ValueError, match="squared variation"):
        mg1_wait_s(1, 0.1, squared_variation=-0.1)


@pytest.mark.parametrize("exponential", [True, False])
def test_a_simulated_queue_agrees(exponential: bool) -> None:
    generator = np.random.default_rng(11)
    means = []
    for _ in range(20):
        arrivals = generator.exponential(1 / 6, 8000)
        services = generator.exponential(0.1, 8000) if exponential else np.full(8000, 0.1)
        means.append(_mean_wait_s(arrivals, services))

    expected = mm1_wait_s(6, 0.1) if exponential else md1_wait_s(6, 0.1)

    assert bootstrap(means, "mean", confidence=0.99).holds(expected)
    assert np.mean(means) == pytest.approx(expected, rel=0.05)


def _mean_wait_s(between_s: np.ndarray, service_s: np.ndarray) -> float:
    """Of one line, by Lindley's recursion in closed form: a waiting time is how far the sum of
    (service - time to the next arrival) has risen above its lowest."""
    walk = np.concatenate(([0.0], np.cumsum(service_s[:-1] - between_s[1:])))
    return float((walk - np.minimum.accumulate(walk)).mean())
