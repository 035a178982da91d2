"""Where jobs wait for a batch."""

from __future__ import annotations

from loadtest.simulate.job import SimJob
from loadtest.trace import TraceRequest
from policies.batch_lobby import BatchLobby
from policies.batching import Batching, BatchingMode
from policies.meter import Meter


def lobby(size: int, window_s: float) -> BatchLobby[SimJob]:
    return BatchLobby(Batching(BatchingMode.DYNAMIC, size, window_s), Meter())


def job(index: int, priority: int = 0) -> SimJob:
    request = TraceRequest(float(index), 8, 2)
    return SimJob(
        index, request, 0, priority=priority, flow=b"", weight=1, ttft_s=None, tpot_s=None
    )


def test_a_batch_is_of_those_whose_turn_it_is_and_waits_for_the_last_one_to_end() -> None:
    waiting = lobby(2, 10.0)
    jobs = [job(0, 1), job(1, 1), job(2, 0)]
    for each in jobs:
        waiting.add(each)
    assert waiting.take_batch(2.0, running=1) == []
    assert waiting.take_batch(2.0, running=0) == [jobs[2], jobs[0]]
    assert list(waiting) == [jobs[1]]


def test_few_are_a_batch_when_the_eldest_has_waited_for_the_window() -> None:
    waiting = lobby(3, 10.0)
    jobs = [job(0), job(1)]
    for each in jobs:
        waiting.add(each)
    assert waiting.take_batch(9.0, running=0) == []
    assert waiting.next_due_s(running=1) is None
    assert waiting.next_due_s(running=0) == 10.0
    assert waiting.take_batch(10.0, running=0) == jobs
    assert waiting.next_due_s(running=0) is None


def test_who_goes_away_is_in_no_batch() -> None:
    waiting = lobby(2, 10.0)
    jobs = [job(0), job(1)]
    for each in jobs:
        waiting.add(each)
    assert waiting.remove(jobs[0])
    assert not waiting.remove(jobs[0])
    assert len(waiting) == 1
    assert waiting.next_due_s(running=0) == 11.0
