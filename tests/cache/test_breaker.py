from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.breaker import Breaker, BreakerState


def test_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(failures=3)
    for _ in range(2):
        breaker.failure(0.0)
    breaker.success()
    for _ in range(2):
        breaker.failure(0.0)
    assert breaker.closed
    breaker.failure(0.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.opened == 1


def test_one_stall_opens() -> None:
    breaker = Breaker()
    breaker.stall(5.0)
    assert not breaker.closed
    assert breaker.wait_s(5.25) == 0.25


def test_waits_double_up_to_the_last() -> None:
    breaker = Breaker(first_retry_s=0.5, last_retry_s=10.0)
    breaker.stall(0.0)
    now_s, waits = 0.0, []
    for _ in range(7):
        wait_s = breaker.wait_s(now_s)
        assert wait_s is not None
        waits.append(wait_s)
        assert not breaker.start_probe(now_s + wait_s * 0.99)
        now_s += wait_s
        assert breaker.start_probe(now_s)
        breaker.probe_failed(now_s)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    now_s += 10.0
    assert breaker.start_probe(now_s)
    breaker.probe_succeeded()
    assert breaker.closed
    breaker.stall(now_s)
    assert breaker.wait_s(now_s) == 0.5


def test_one_probe_at_a_time() -> None:
    breaker = Breaker(starts_open=True)
    assert breaker.wait_s(0.0) == 0.0
    assert breaker.start_probe(0.0)
    assert breaker.state is BreakerState.PROBING
    assert not breaker.start_probe(100.0)
    assert breaker.wait_s(100.0) is None


EVENTS = st.sampled_from(["success", "failure", "stall", "start", "probe_ok", "probe_bad"])


@settings(max_examples=200, deadline=None)
@given(events=st.lists(st.tuples(EVENTS, st.floats(0.0, 3.0)), max_size=60))
def test_only_a_probe_closes_and_questions_stop_in_time(
    events: list[tuple[str, float]],
) -> None:
    breaker = Breaker(failures=3, first_retry_s=0.5, last_retry_s=4.0)
    now_s, in_a_row = 0.0, 0
    for event, passed_s in events:
        now_s += passed_s
        before = breaker.state
        if event == "success":
            breaker.success()
            in_a_row = 0
        elif event == "failure":
            breaker.failure(now_s)
            in_a_row += 1
        elif event == "stall":
            breaker.stall(now_s)
        elif event == "start":
            wait_s = breaker.wait_s(now_s)
            assert breaker.start_probe(now_s) == (wait_s == 0.0)
        elif event == "probe_ok":
            breaker.probe_succeeded()
        else:
            breaker.probe_failed(now_s)
        after = breaker.state
        if before is not BreakerState.CLOSED and after is BreakerState.CLOSED:
            assert (before, event) == (BreakerState.PROBING, "probe_ok")
            in_a_row = 0
        if after is BreakerState.CLOSED:
            assert in_a_row < 3
        wait_s = breaker.wait_s(now_s)
        assert wait_s is None or 0.0 <= wait_s <= 4.0
        assert (wait_s is None) == (after is not BreakerState.OPEN)
