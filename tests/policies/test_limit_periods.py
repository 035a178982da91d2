"""Days and months in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.limit_periods import next_period_s, period_start_s

MOMENTS = st.datetimes(datetime(1970, 1, 1), datetime(2400, 1, 1), timezones=st.just(UTC))


@settings(max_examples=60, deadline=None)
@given(MOMENTS)
def test_as_the_calendar_has_them(moment: datetime) -> None:
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    next_month = (month + timedelta(days=32)).replace(day=1)
    unix_s = moment.timestamp()
    assert period_start_s("day", unix_s) == day.timestamp()
    assert next_period_s("day", int(day.timestamp())) == (day + timedelta(days=1)).timestamp()
    assert period_start_s("month", unix_s) == month.timestamp()
    assert next_period_s("month", int(month.timestamp())) == next_month.timestamp()


def test_a_leap_day_and_the_last_second_of_a_year() -> None:
    leap = datetime(2028, 2, 29, 23, 59, 59, tzinfo=UTC).timestamp()
    assert period_start_s("month", leap) == datetime(2028, 2, 1, tzinfo=UTC).timestamp()
    last = datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
    start_s = period_start_s("month", last)
    assert next_period_s("month", start_s) == datetime(2026, 1, 1, tzinfo=UTC).timestamp()
