"""What promises, shares and refusals come to together, under twice the load that can be taken."""

from __future__ import annotations

import pytest

from tests.policies.overload_simulation import Overload

CAPACITY_PER_S = 17.8
"""Of prompts of 128 tokens with answers of 32, as measured here under a flood."""


@pytest.mark.parametrize("ttft_s", [1.0, 2.0])
def test_in_overload_as_much_is_in_time_as_at_capacity_and_shares_are_kept(ttft_s: float) -> None:
    prompt = (128, 128)
    flood = Overload(ttft_s, in_turn=True).run(4 * CAPACITY_PER_S, 30.0, prompt)
    answered_per_s = sum(flood.met + flood.late) / 30.0
    assert answered_per_s == pytest.approx(CAPACITY_PER_S, rel=0.03)
    capacity = Overload(ttft_s).run(CAPACITY_PER_S, 60.0, prompt)
    overload = Overload(ttft_s).run(2 * CAPACITY_PER_S, 60.0, prompt)
    in_turn = Overload(ttft_s, in_turn=True).run(2 * CAPACITY_PER_S, 60.0, prompt)
    assert overload.goodput_per_s >= 1.5 * in_turn.goodput_per_s
    assert overload.goodput_per_s >= capacity.goodput_per_s
    assert overload.goodput_per_s >= 0.9 * CAPACITY_PER_S
    assert overload.over_shares == [pytest.approx(1.0, abs=0.05)] * 3
    kept = sum(overload.met) / sum(overload.met + overload.late)
    assert kept >= 0.93


def test_prompts_of_very_different_lengths_share_by_what_they_take() -> None:
    overload = Overload(2.0).run(15.0, 100.0, (60, 900))
    in_turn = Overload(2.0, in_turn=True).run(15.0, 100.0, (60, 900))
    assert overload.goodput_per_s >= 1.5 * in_turn.goodput_per_s
    assert overload.over_shares == [pytest.approx(1.0, abs=0.08)] * 3
