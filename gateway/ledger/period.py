"""Which time a question about the ledger is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.errors import bad_request

_DAY_S = 86_400
_USUAL_S = float(_DAY_S)
_UNIX = re.compile(r"[0-9]{1,11}(\.[0-9]{1,9})?")
_RFC3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[Tt ]([0-9]{2}:[0-9]{2}:[0-9]{2})(\.[0-9]{1,9})?([Zz]|[+ -][0-9]{2}:[0-9]{2}))?"
)


class Period(NamedTuple):
    """From `start_s` on and before `end_s`, in Unix seconds."""

    start_s: float
    end_s: float


def read_period(query: Mapping[str, str], now_s: float, *, longest_s: float | None) -> Period:
    """`start` and `end` of a query string: Unix seconds, RFC 3339, or a date, which begins at
    midnight UTC. Without `end` it is until now, without `start` 24 hours.

    Raises a 400 ApiError, also for more than `longest_s`.
    """
    end_s = _moment(query, "end")
    end_s = now_s if end_s is None else end_s
    start_s = _moment(query, "start")
    start_s = end_s - _USUAL_S if start_s is None else start_s
    if not start_s < end_s:
        raise bad_request("start must be before end.", param="start")
    if longest_s is not None and end_s - start_s > longest_s:
        raise bad_request(
            f"start and end may be at most {longest_s / _DAY_S:.0f} days apart.", param="start"
        )
    return Period(start_s, end_s)


def _moment(query: Mapping[str, str], name: str) -> float | None:
    value = query.get(name)
    if value is None:
        return None
    if _UNIX.fullmatch(value):
        return float(value)
    if (found := _RFC3339.fullmatch(value)) is not None:
        date, time, fraction, offset = found.groups()
        # a plus that was not escaped arrives as a space
        zone = (offset or "Z").replace(" ", "+").upper().replace("Z", "+00:00")
        try:
            moment = datetime.fromisoformat(f"{date}T{time or '00:00:00'}{zone}")
            return moment.astimezone(UTC).timestamp() + float(fraction or 0)
        except (ValueError, OverflowError):
            pass
    raise bad_request(
        f"{name} must be Unix seconds, a date, or a time as in 2026-01-31T12:00:00Z.", param=name
    )
