"""What jobs are charged for, and whose prompt comes first by it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fairness import GENERATED_UNITS
from policies.meter import Meter, place
from tests.policies.jobs import PlainJob


def test_a_job_pays_for_what_it_computes_and_for_the_answer_that_is_expected():
    meter, job = Meter(), PlainJob(0, known=100, flow=b"a", weight=2.0, max_tokens=8)
    meter.begin(job, 40)
    assert job.prepaid == 60 + GENERATED_UNITS * 8
    assert meter.counters(0).count(b"a") == job.prepaid / 2
    assert job.tag == 30.0  # where its prompt ends on its flow's clock


def test_what_was_computed_before_a_preemption_costs_nothing_again():
    meter, job = Meter(), PlainJob(0, known=100)
    meter.begin(job, 0)
    meter.serve(job, 60, generates=False)
    before = meter.counters(0).count(b"")
    job.computed = 0
    meter.settle(job)
    meter.begin(job, 0)
    assert job.prepaid == 40 + GENERATED_UNITS * 8
    assert meter.counters(0).count(b"") == before
    meter.serve(job, 60, generates=False)
    assert job.prepaid == 40 + GENERATED_UNITS * 8


@settings(max_examples=50, deadline=None)
@given(
    known=st.integers(1, 300),
    found=st.integers(0, 300),
    chunk=st.integers(1, 64),
    answer=st.integers(1, 40),
    max_tokens=st.integers(1, 100),
    weight=st.floats(0.1, 10),
)
def test_a_flow_has_paid_for_what_was_served_when_a_job_ends(
    known, found, chunk, answer, max_tokens, weight
):
    found = min(found, known - 1)
    meter = Meter()
    job = PlainJob(0, known=known, flow=b"a", weight=weight, max_tokens=max_tokens)
    meter.begin(job, found)
    job.computed = found
    while job.generated < answer:
        end = min(job.known, job.computed + chunk)
        meter.serve(job, end, generates=end == job.known)
        job.computed = end
        if end == job.known:
            job.generated += 1
            job.known += 1
        assert job.prepaid >= 0
    meter.settle(job)
    meter.end(job)
    units = known - found + GENERATED_UNITS * answer - 1  # the last token is not computed
    assert meter.take_served().units == {0: units}
    assert meter.take_served().units == {}
    assert meter.counters(0).count(b"a") == pytest.approx(units / weight)
    assert meter.counters(0).expected_answer_tokens(b"a", 10_000) == answer


def test_a_turn_is_used_up_by_what_is_served():
    meter, job = Meter(), PlainJob(0, known=100, priority=2)
    meter.begin(job, 0)
    job.turn = 50.0
    meter.serve(job, 30, generates=False)
    job.computed = 30
    assert job.turn == 20.0
    meter.serve(job, 100, generates=True)
    assert job.turn == 0.0
    served = meter.take_served()
    assert served.units == {2: 101}
    assert served.in_turns == {2: 50.0}


def begun(meter: Meter, job: PlainJob) -> PlainJob:
    meter.begin(job, 0)
    return job


def test_a_waiting_prompt_comes_before_others_by_class_then_by_its_flows_share():
    meter = Meter()
    long = begun(meter, PlainJob(0, known=1000, flow=b"a"))
    assert meter.precedes(PlainJob(1, priority=-1, known=5000, flow=b"b"), long)
    assert not meter.precedes(PlainJob(1, priority=1, known=1, flow=b"b"), long)
    assert meter.precedes(PlainJob(1, known=900, flow=b"b"), long)
    assert not meter.precedes(PlainJob(1, known=1100, flow=b"b"), long)
    assert meter.precedes(PlainJob(1, known=1100, flow=b"b", weight=2.0), long)
    assert not meter.precedes(PlainJob(1, known=10, flow=b"a"), long)


def test_who_was_preempted_keeps_its_place_among_its_own_flow():
    meter = Meter()
    first = begun(meter, PlainJob(0, known=100, flow=b"a"))
    second = begun(meter, PlainJob(1, known=100, flow=b"a"))
    first.begun = True
    assert meter.precedes(first, second)
    assert sorted([second, first], key=place) == [first, second]


def test_who_is_urged_into_another_class_is_behind_nobody_there():
    meter = Meter()
    begun(meter, PlainJob(0, known=50, flow=b"a", priority=-1))
    job = begun(meter, PlainJob(1, known=5000, flow=b"b"))
    job.rank = job.rank._replace(priority=-1)
    meter.moved(job)
    assert job.tag == meter.counters(-1).time
    assert not meter.precedes(PlainJob(2, known=1, flow=b"c", priority=-1), job)
