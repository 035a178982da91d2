"""Whether the client says so when it is too slow."""

from __future__ import annotations

import asyncio
import gc
import time

import numpy as np
import pytest

from loadtest.live.garbage import without_collections
from loadtest.live.health import LagProbe, Lags, Strain, health_of

NO_LAGS = Lags(np.array([]), np.array([]), 0.005)
LAGS = Lags(np.array([1.0, 2.0, 3.0]), np.array([1.001, 2.02, 3.5]), 0.005)


async def test_a_blocked_loop_is_seen_and_complained_of() -> None:
    with LagProbe() as probe:
        await asyncio.sleep(0.02)
        began_s = time.perf_counter()
        time.sleep(0.05)  # noqa: ASYNC251 - blocking the loop is the point
        ended_s = time.perf_counter()
        await asyncio.sleep(0.02)
    lags = probe.lags()
    health = health_of(Strain(lags, [], cpu_share=0.1, most_open=1))

    assert lags.longest_within(began_s, ended_s) > 0.03
    assert health.lag_max_s > 0.03
    assert len(health.complaints) == 1
    assert "latencies are not to be trusted" in health.complaints[0]


@pytest.mark.parametrize(
    ("start_s", "end_s", "longest_s"),
    [
        (0.0, 0.5, 0.0),  # before all of them
        (0.5, 1.5, 0.001),
        (1.5, 2.01, 0.02),  # begun within
        (2.01, 2.5, 0.02),  # ended within
        (3.1, 3.2, 0.5),  # within the lag
        (0.0, 9.0, 0.5),
        (4.0, 9.0, 0.0),
    ],
)
def test_a_request_is_marked_with_the_longest_lag_of_its_life(
    start_s: float, end_s: float, longest_s: float
) -> None:
    assert LAGS.longest_within(start_s, end_s) == pytest.approx(longest_s)


def test_a_long_lag_weighs_by_how_long_it_took() -> None:
    lags = Lags(np.array([0.0, 0.1]), np.array([0.0, 0.1125]), 0.005)

    assert lags.spread_s() == pytest.approx([0.0, 0.0125, 0.0075, 0.0025])


def test_a_probe_that_came_early_is_no_lag() -> None:
    lags = Lags(np.array([1.0]), np.array([0.9995]), 0.005)

    assert lags.spread_s() == [0.0]
    assert lags.longest_within(0.0, 2.0) == 0.0


def test_a_fit_client_has_nothing_to_complain_of() -> None:
    health = health_of(Strain(NO_LAGS, [0.0, 0.002], cpu_share=0.5, most_open=7))

    assert health.complaints == ()
    assert (health.late_max_s, health.most_open, health.lag_max_s) == (0.002, 7, 0.0)


@pytest.mark.parametrize(
    ("strain", "complaint"),
    [
        (Strain(NO_LAGS, [0.0, 0.031], 0.1, 1), "was sent over 31 ms late"),
        (Strain(LAGS, [], 0.1, 1), "time stamp in a hundred"),
        (Strain(NO_LAGS, [], 0.95, 1), "took 95% of one core"),
        (Strain(NO_LAGS, [], 0.1, 1, refused_sockets=3), "3 requests were not sent"),
    ],
)
def test_each_strain_has_its_complaint(strain: Strain, complaint: str) -> None:
    (said,) = health_of(strain).complaints

    assert complaint in said


def test_garbage_waits_until_the_scope_ends() -> None:
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
