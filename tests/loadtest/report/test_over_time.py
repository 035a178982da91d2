"""Runs in steps of time, the cache's tiers among them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest.columns import Columns
from loadtest.record import Outcome, Sample, Tiers
from loadtest.report.cache_over_time import DEVICE, DRAM, REDIS, SOME_TIER, tier_shares
from loadtest.report.over_time import Steps, end_of, sent_rate, told
from tests.loadtest.report.made_runs import answer, failure, queue

FOUR_S = Steps(np.linspace(0.0, 4.0, 5))


def test_there_are_few_steps_for_few_requests_and_never_many() -> None:
    assert len(Steps.of(3, 10.0).middles) == 12
    assert len(Steps.of(240, 10.0).middles) == 30
    assert len(Steps.of(10**6, 10.0).middles) == 60


def test_rates_and_percentiles_of_each_step() -> None:
    times = np.array([0.0, 0.5, 3.5, 4.0])
    assert FOUR_S.rate(times) == [2.0, 0.0, 0.0, 2.0]
    (middle,) = FOUR_S.percentiles(times, np.array([1.0, 3.0, np.nan, 7.0]), 0.5)
    assert middle[0] == 2.0
    assert math.isnan(middle[1])
    assert middle[3] == 7.0


def test_output_tokens_are_spread_over_their_answer_and_none_is_lost() -> None:
    columns = Columns.of([answer(0, 0.4, ttft_s=0.1, tpot_s=0.1, output_tokens=21)])
    assert FOUR_S.output_rate(columns) == pytest.approx([6.0, 10.0, 5.0, 0.0])
    made = Columns.of(queue(1.5, 60).records)
    steps = Steps.of(60, end_of(made, 0.0) + 1e-6)
    assert sum(steps.output_rate(made)) * steps.width_s == pytest.approx(60 * 11)


def test_open_requests_and_failures() -> None:
    columns = Columns.of(
        [answer(0, 0.0, ttft_s=2.0), answer(1, 1.0), failure(2, 3.0, Outcome.TIMED_OUT)]
    )
    assert FOUR_S.unanswered(columns) == [1.0, 1.0, 0.0, 0.0]
    assert FOUR_S.failures(columns) == {Outcome.TIMED_OUT: [0.0, 0.0, 0.0, 1.0]}


def test_the_rate_at_which_was_sent() -> None:
    assert sent_rate(Columns.of([answer(n, n / 4) for n in range(9)])) == 4.0
    assert sent_rate(Columns.of([answer(0, 0.0)])) is None
    assert sent_rate(Columns.of([answer(0, 1.0), answer(1, 1.0)])) is None


def test_many_samples_become_means_of_neighbours() -> None:
    samples = [Sample(float(n), waiting=float(n % 2)) for n in range(600)]
    points = told(samples, "waiting")
    assert len(points) == 60
    assert points[0] == (4.5, 0.5)
    assert told(samples, "running") == []


def test_tiers_as_the_server_told() -> None:
    samples = [
        Sample(0.0, prompt_tokens=1000.0, cached_device_tokens=500.0, cached_dram_tokens=0.0),
        Sample(1.0, prompt_tokens=1100.0, cached_device_tokens=550.0, cached_dram_tokens=10.0),
        Sample(2.0, prompt_tokens=1100.0, cached_device_tokens=550.0, cached_dram_tokens=10.0),
        Sample(3.0, prompt_tokens=1300.0, cached_device_tokens=550.0, cached_dram_tokens=60.0),
    ]
    found = tier_shares(samples, Columns.of([]), FOUR_S)
    assert found is not None
    assert found.edges == [0.0, 1.0, 2.0, 3.0]
    assert found.shares[DEVICE] == pytest.approx([0.5, math.nan, 0.0], nan_ok=True)
    assert found.shares[DRAM] == pytest.approx([0.1, math.nan, 0.25], nan_ok=True)
    assert REDIS not in found.shares


def test_tiers_as_the_answers_told() -> None:
    records = [
        answer(0, 0.0, tiers=Tiers(20, 0, 0)),
        answer(1, 0.2, tiers=Tiers(0, 40, 10)),
        failure(2, 1.0, Outcome.BROKEN),
    ]
    found = tier_shares([], Columns.of(records), FOUR_S)
    assert found is not None
    assert [found.shares[tier][0] for tier in (DEVICE, DRAM, REDIS)] == [0.1, 0.2, 0.05]
    assert math.isnan(found.shares[DEVICE][1])


def test_tiers_that_are_known_of_some_answers_only_are_put_together() -> None:
    unknown = Columns.of([answer(0, 0.0)])
    assert tier_shares([Sample(0.0), Sample(1.0)], unknown, FOUR_S) is None
    columns = Columns.of([answer(0, 0.0, tiers=Tiers(20, 0, 0))])
    columns.device_tokens[:] = np.nan
    found = tier_shares([], columns, FOUR_S)
    assert found is not None
    assert found.shares[SOME_TIER][0] == pytest.approx(0.2)


def test_shares_stay_within_the_whole_when_counters_run_ahead() -> None:
    samples = [
        Sample(0.0, prompt_tokens=0.0, cached_device_tokens=0.0),
        Sample(1.0, prompt_tokens=50.0, cached_device_tokens=100.0),
    ]
    found = tier_shares(samples, Columns.of([]), FOUR_S)
    assert found is not None
    assert found.shares[DEVICE] == [1.0]
