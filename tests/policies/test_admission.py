"""Who is let in, who waits, who is refused and when to come again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission import (
    ADMITTED,
    LONGEST_RETRY_S,
    Verdict,
    Wish,
    judge,
    judge_full,
    judge_waiting,
    until_place_s,
)
from policies.routing import Prediction, Standing
from policies.slo import OnOverload
from tests.policies.fleet_simulation import BUNDLED

WISH = Wish(ttft_s=1.0, timeout_s=None, elapsed_s=0.0, max_queue_s=60.0, on_overload="reject")
OVERLOAD: dict[OnOverload, Verdict] = {
    "reject": Verdict.SHED,
    "queue": Verdict.QUEUE,
    "downgrade": Verdict.DOWNGRADE,
}


def first_token_in(queue_s: float, prefill_s: float = 0.1) -> Prediction:
    return Prediction(queue_s, 0.0, prefill_s)


def test_who_is_in_time_is_let_in() -> None:
    assert judge(first_token_in(0.6), WISH) is ADMITTED
    assert judge(first_token_in(9.0), replace(WISH, ttft_s=None)) is ADMITTED


@pytest.mark.parametrize("on_overload", OVERLOAD)
def test_who_would_be_late_gets_what_its_tenant_wants(on_overload: OnOverload) -> None:
    ruling = judge(first_token_in(3.3), replace(WISH, on_overload=on_overload))
    # 3.4 s until the first token, 0.75 s of which would do
    assert ruling == (OVERLOAD[on_overload], "slo", 3)


def test_what_has_passed_already_counts_but_not_for_who_comes_again() -> None:
    assert judge(first_token_in(0.5), replace(WISH, elapsed_s=0.1)) is ADMITTED
    ruling = judge(first_token_in(0.5), replace(WISH, elapsed_s=0.5))
    assert ruling == (Verdict.SHED, "slo", 1)


def test_a_long_prompt_is_no_overload_where_nobody_is_in_front() -> None:
    assert judge(first_token_in(0.0, prefill_s=5.0), WISH) is ADMITTED
    assert judge(first_token_in(0.2, prefill_s=5.0), WISH) is ADMITTED
    ruling = judge(first_token_in(4.0, prefill_s=5.0), WISH)
    assert ruling == (Verdict.SHED, "slo", 4)


def test_what_is_late_all_by_itself_is_let_in_where_little_waits() -> None:
    wish = replace(WISH, ttft_s=0.005, elapsed_s=0.02)  # reading it alone took longer
    for queue_s, verdict in ((0.0, Verdict.ADMIT), (0.001, Verdict.ADMIT), (0.002, Verdict.SHED)):
        assert judge(Prediction(queue_s, 0.0, 0.03), wish).verdict is verdict


@pytest.mark.parametrize("on_overload", OVERLOAD)
def test_too_much_work_is_refused_whatever_was_promised(on_overload: OnOverload) -> None:
    wish = replace(WISH, ttft_s=None, max_queue_s=10.0, on_overload=on_overload)
    assert judge(first_token_in(10.0), wish) is ADMITTED
    assert judge(first_token_in(12.5), wish) == (Verdict.SHED, "work", 3)


@pytest.mark.parametrize("on_overload", OVERLOAD)
def test_who_would_leave_before_the_first_token_is_refused_at_once(on_overload: OnOverload) -> None:
    wish = replace(WISH, ttft_s=None, timeout_s=2.0, elapsed_s=0.5, on_overload=on_overload)
    assert judge(first_token_in(1.3), wish) is ADMITTED
    assert judge(first_token_in(1.5), wish) == (Verdict.SHED, "timeout", 1)
    assert judge(first_token_in(7.2), wish) == (Verdict.SHED, "timeout", 6)


def test_retry_after_is_a_whole_number_within_reason() -> None:
    ruling = judge(first_token_in(1e9), replace(WISH, max_queue_s=1e12))
    assert ruling.retry_after_s == LONGEST_RETRY_S
    assert judge(first_token_in(float("inf")), WISH).retry_after_s == LONGEST_RETRY_S


def test_who_has_waited_until_late_lets_those_before_who_are_not() -> None:
    late = replace(WISH, elapsed_s=3.0, on_overload="queue")
    assert judge_waiting(first_token_in(0.5), late) is ADMITTED
    assert judge_waiting(first_token_in(0.52), late).verdict is Verdict.QUEUE
    early = replace(late, elapsed_s=0.1)
    assert judge_waiting(first_token_in(0.52), early) is ADMITTED


def test_who_has_waited_for_a_place_takes_it() -> None:
    wish = replace(WISH, ttft_s=None, elapsed_s=5.0, on_overload="queue")
    assert judge_waiting(first_token_in(7.0), wish) is ADMITTED


def test_who_has_waited_in_vain_is_told_so() -> None:
    wish = replace(WISH, timeout_s=2.0, elapsed_s=1.95, on_overload="queue")
    assert judge_waiting(first_token_in(3.2), wish) == (Verdict.SHED, "timeout", 4)


@pytest.mark.parametrize("on_overload", OVERLOAD)
def test_where_every_place_is_taken(on_overload: OnOverload) -> None:
    ruling = judge_full(replace(WISH, on_overload=on_overload), 2.2)
    assert ruling == (OVERLOAD[on_overload], "places", 3)


def test_a_place_is_free_when_enough_answers_have_ended() -> None:
    standing = Standing(waiting=3, running=16, context_tokens=16_000, answer_tokens=100)
    step_s = BUNDLED.decode_step_s(16, 1000)
    assert until_place_s(standing, BUNDLED, 20) == 0.0
    assert until_place_s(standing, BUNDLED, 19) == pytest.approx(100 * step_s / 16)
    assert until_place_s(standing, BUNDLED, 17) == pytest.approx(3 * 100 * step_s / 16)
    assert until_place_s(Standing(waiting=2), BUNDLED, 2) > 0
    assert until_place_s(standing, BUNDLED, float("inf")) == 0.0


times = st.floats(0, 100)
wishes = st.builds(
    Wish,
    ttft_s=st.none() | st.floats(0.01, 30),
    timeout_s=st.none() | st.floats(0.01, 100),
    elapsed_s=st.floats(0, 20),
    max_queue_s=st.floats(0.1, 60),
    on_overload=st.sampled_from(list(OVERLOAD)),
)


@given(times, times, times, wishes, st.floats(0, 50))
@settings(max_examples=60, deadline=None)
def test_less_in_front_never_makes_it_worse_and_who_comes_again_fits(
    queue_s: float, load_s: float, prefill_s: float, wish: Wish, less_s: float
) -> None:
    prediction = Prediction(queue_s, load_s, prefill_s)
    ruling = judge(prediction, wish)
    assert (ruling.retry_after_s >= 1) == (ruling.verdict is not Verdict.ADMIT)
    shorter = prediction._replace(queue_s=max(0.0, queue_s - less_s))
    if ruling.verdict is Verdict.ADMIT:
        assert judge(shorter, wish).verdict is Verdict.ADMIT
    alone_s = load_s + prefill_s
    in_vain = wish.timeout_s is not None and alone_s > wish.timeout_s
    if ruling.retry_after_s < LONGEST_RETRY_S and not in_vain:
        # the queue has gone by so much when it comes again, if nobody else came: then the same
        # reason does not hold any more
        later = prediction._replace(queue_s=max(0.0, queue_s - ruling.retry_after_s - 1e-6))
        again = judge(later, replace(wish, elapsed_s=0.0))
        assert again.verdict is Verdict.ADMIT or again.reason != ruling.reason
