"""Which time is meant."""

from __future__ import annotations

import pytest

from gateway.errors import ApiError
from gateway.ledger.period import Period, read_period

NOW_S = 1_769_860_800.0  # 2026-01-31T12:00:00Z
DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("written", "meant_s"),
    [
        ("1769850000", 1_769_850_000.0),
        ("1769850000.25", 1_769_850_000.25),
        ("2026-01-31", 1_769_817_600.0),
        ("2026-01-31T11:59:59Z", NOW_S - 1),
        ("2026-01-31t11:59:59.5z", NOW_S - 0.5),
        ("2026-01-31T12:59:59+01:00", NOW_S - 1),
        ("2026-01-31T12:59:59 01:00", NOW_S - 1),
        ("2026-01-31T06:29:59-05:30", NOW_S - 1),
    ],
)
def test_ways_to_write_a_time(written: str, meant_s: float) -> None:
    assert read_period({"start": written}, NOW_S, longest_s=None) == Period(meant_s, NOW_S)
    found = read_period({"start": "0", "end": written}, NOW_S, longest_s=None)
    assert found == Period(0.0, meant_s)


def test_what_is_left_out() -> None:
    assert read_period({}, NOW_S, longest_s=None) == Period(NOW_S - DAY_S, NOW_S)
    assert read_period({"end": "200000"}, NOW_S, longest_s=None) == Period(200_000 - DAY_S, 200_000)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"start": "yesterday"}, "start"),
        ({"end": ""}, "end"),
        ({"start": "-5"}, "start"),
        ({"start": "1e9"}, "start"),
        ({"start": "٣"}, "start"),
        ({"start": "2026-02-30"}, "start"),
        ({"start": "2026-01-31T12:00:00"}, "start"),
        ({"start": "2026-01-31T25:00:00Z"}, "start"),
        ({"end": "0001-01-01T00:00:00+23:59"}, "end"),
        ({"start": "5", "end": "5"}, "start"),
        ({"start": "0", "end": "864001"}, "start"),
    ],
)
def test_what_is_no_time(query: dict[str, str], param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        read_period(query, NOW_S, longest_s=10 * DAY_S)
    assert (refusal.value.status, refusal.value.param) == (400, param)
