"""The calendar days and months, in UTC, that budgets are for. Times are Unix seconds."""

from __future__ import annotations

from policies.limits import BudgetPeriod

_DAY_S = 86_400


def period_start_s(per: BudgetPeriod, unix_s: float) -> int:
    """When the day or month of this moment began."""
    day = int(unix_s // _DAY_S)
    return (day if per == "day" else day - _day_of_month(day) + 1) * _DAY_S


def next_period_s(per: BudgetPeriod, start_s: int) -> int:
    """When the period after the one that began at `start_s` begins."""
    if per == "day":
        return start_s + _DAY_S
    return period_start_s("month", start_s + 31 * _DAY_S)


def _day_of_month(day: int) -> int:
    """1 to 31, for a day counted from 1970-01-01.

    The proleptic Gregorian calendar in years that begin in March, so that the leap day is the last
    one: https://howardhinnant.github.io/date_algorithms.html, `civil_from_days`.
    """
    of_era = (day + 719_468) % 146_097
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    return of_year - (153 * month + 2) // 5 + 1
