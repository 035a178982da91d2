"""What the load client can hold, measured small."""

from __future__ import annotations

import pytest

from loadtest.bench.client_capacity import Pace, capacity_table, delays_ms, measure_capacity
from tests.loadtest.fake_server import token_event
from tests.loadtest.live.conversations import read_of


async def test_every_stream_is_held_and_every_token_counted() -> None:
    figures = await measure_capacity(Pace(streams=12, interval_ms=20, seconds=0.1, groups=3))

    assert (figures.most_open, figures.failed, figures.tokens) == (12, 0, 60)
    assert 0 < figures.delay_p50_ms <= figures.delay_p99_ms <= figures.delay_max_ms
    assert figures.tokens_per_s > 0
    (row,) = capacity_table([figures]).rows
    assert row[:3] == ("12", "4.00", "0")


def test_a_delay_is_from_the_stamp_to_the_arrival() -> None:
    reader = read_of((1.5, token_event("1.25 ")), (2.0, token_event("1.75 ", "length")))

    assert delays_ms(reader) == pytest.approx([250.0, 250.0])


@pytest.mark.parametrize(("seconds", "tokens"), [(0.1, 5), (0.001, 2), (25.0, 1250)])
def test_a_pace_lasts_for_its_seconds(seconds: float, tokens: int) -> None:
    assert Pace(interval_ms=20, seconds=seconds).tokens == tokens
