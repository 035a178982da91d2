"""Whose turn it is among those who wait."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.meter import Meter
from policies.scheduling import PATIENCE_S
from policies.waiting_line import WaitingLine
from tests.policies.jobs import PlainJob


def line_of(*jobs: PlainJob, meter: Meter | None = None) -> WaitingLine[PlainJob]:
    line = WaitingLine[PlainJob](meter or Meter())
    for job in jobs:
        line.add(job)
    return line


def order(line: WaitingLine[PlainJob], now_s: float = 0.0) -> list[int]:
    return [job.arrival for job in line.in_order(now_s)]


def test_the_more_urgent_class_is_first_and_who_has_begun_is_first_in_its_class():
    line = line_of(
        PlainJob(0, priority=1, begun=True),
        PlainJob(1),
        PlainJob(2, begun=True),
        PlainJob(3, priority=-1),
    )
    assert order(line) == [3, 2, 1, 0]
    assert line.priorities == [-1, 0, 1]
    assert [job.arrival for job in line.of_class(0, 0.0)] == [2, 1]
    assert list(line.of_class(7, 0.0)) == []


def test_flows_take_turns_as_they_are_charged():
    meter = Meter()
    line = line_of(
        *(PlainJob(i, flow=b"a") for i in range(3)),
        *(PlainJob(i, flow=b"b", weight=2.0) for i in range(3, 9)),
        meter=meter,
    )
    turns = []
    for job in line.in_order(0.0):
        line.remove(job)
        meter.begin(job, 0)
        turns.append(job.flow)
    assert turns == [b"a", b"b", b"b", b"a", b"b", b"b", b"a", b"b", b"b"]
    assert len(line) == 0


def test_a_flow_that_is_charged_outside_its_turn_is_later():
    meter = Meter()
    line = line_of(PlainJob(0, flow=b"a"), PlainJob(1, flow=b"b"), meter=meter)
    meter.counters(0).charge(b"a", 100.0, 1.0)
    assert order(line) == [1, 0]


def test_within_a_flow_what_is_due_first_goes_first_until_it_is_late():
    early = PlainJob(1, arrived_s=5.0, deadline_s=8.0)
    line = line_of(PlainJob(0, arrived_s=0.0), early)
    assert order(line, 6.0) == [1, 0]
    assert order(line, 9.0) == [0, 1]
    assert early.due_s == 5.0 + PATIENCE_S


def test_the_one_that_was_yielded_may_be_removed():
    line = line_of(*(PlainJob(i, flow=b"%d" % (i % 2)) for i in range(6)))
    for seen, job in enumerate(line.in_order(0.0), 1):
        assert line.remove(job)
        assert not line.remove(job)
        assert len(line) == 6 - seen
    assert line.priorities == []


JOBS = st.lists(
    st.builds(
        dict,
        priority=st.integers(-1, 1),
        flow=st.sampled_from([b"a", b"b", b"c"]),
        weight=st.sampled_from([1.0, 2.0]),
        begun=st.booleans(),
        arrived_s=st.floats(0, 10),
        deadline_s=st.none() | st.floats(0, 60),
    ),
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(JOBS, st.floats(0, 100), st.sets(st.integers(0, 11)))
def test_everybody_has_one_turn_and_nobody_is_lost(terms, now_s, leave):
    jobs = [PlainJob(arrival, **each) for arrival, each in enumerate(terms)]
    line = line_of(*jobs)
    for job in jobs:
        if job.arrival in leave:
            assert line.remove(job)
    stay = [job for job in jobs if job.arrival not in leave]
    turns = list(line.in_order(now_s))
    assert sorted(job.arrival for job in turns) == [job.arrival for job in stay]
    assert set(line) == set(stay)
    assert len(line) == len(stay)
    assert [job.rank.priority for job in turns] == sorted(job.rank.priority for job in stay)
    for priority in line.priorities:
        own = [job for job in turns if job.rank.priority == priority]
        assert [job.begun for job in own] == sorted((job.begun for job in own), reverse=True)
        for flow in (b"a", b"b", b"c"):
            fresh = [job for job in own if job.flow == flow and not job.begun]
            assert fresh == sorted(fresh, key=lambda job: (job.due_s, job.arrival))
