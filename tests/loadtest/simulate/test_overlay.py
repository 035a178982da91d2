from __future__ import annotations

import pytest

from loadtest.simulate.ideal import ideal_hit_rate
from loadtest.simulate.overlay import overlaid
from tests.loadtest.simulate.fleets import chains


def test_copies_are_alike_and_share_nothing() -> None:
    trace = chains(40, per_s=1.0)
    twice = overlaid(trace, 3, seed=1)
    assert len(twice.requests) == 120
    times_s = [each.at_s for each in twice.requests]
    assert times_s == sorted(times_s)
    assert ideal_hit_rate(twice) == pytest.approx(ideal_hit_rate(trace))
    lengths = sorted(each.prompt_tokens for each in trace.requests)
    assert sorted(each.prompt_tokens for each in twice.requests) == sorted(lengths * 3)
    assert [each.at_s for each in twice.requests[10:13]] == times_s[10:13]


def test_no_copy_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one copy"):
        overlaid(chains(2, per_s=1.0), 0)
