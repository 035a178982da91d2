"""Usage as JSON.

One group is an object like this; a list of them is in `data`, and their sum in `total`:

    {
      "tenant": "acme",                 # where tenants are kept apart, or one was asked for
      "model": "m",                     # or key, service_class; or, for hours and days in UTC,
      "start": 1769850000,              #   when it begins, in Unix seconds
      "requests": {"total": 10, "by_outcome": {"success": 9, "cancelled": 1}},
      "prompt_tokens": 5000,            # cached ones included
      "cached_tokens": {"total": 600, "device": 300, "dram": 200, "redis": 100},
      "written_tokens": 50,             # computed, and kept because the request asked for it
      "output_tokens": 400,
      "cost_usd": "0.000010000",        # exact; storage of named prefixes included
      "cost_nusd": 10000,               # the same in billionths of a dollar
      "storage": {"token_hours": 1.5, "cost_usd": "0.000000000", "cost_nusd": 0},
      "slo": {
        "promised": 10,                 # requests that were promised something
        "met": 9,                       # those of them that got it
        "attainment": 0.9,              # null where nothing was promised
        "goodput_rps": 0.0025           # met per second of the time asked for that has passed
      },
      "latency_ms": {                   # null where there is nothing to measure
        "ttft": {"p50": 200.0, "p90": 250.0, "p95": 300.0, "p99": 300.0},
        "tpot": {...},
        "publish": {...}                # to the first text that is part of the answer
      }
    }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.errors import ApiError, bad_request, unavailable
from gateway.ledger.book import LedgerBook
from gateway.ledger.group_by import GroupBy
from gateway.ledger.period import Period, read_period
from gateway.ledger.table import LedgerUnavailable
from gateway.ledger.usage import MOST_GROUPS, Percentiles, TooManyGroups, Usage, UsageQuery
from policies.pricing import usd_text

_LONGEST_S = 400 * 86_400.0
_MOST_BUCKETS = 1000
_RETRY_AFTER_S = 5
_GROUPS = [each.value for each in GroupBy]
USAGE_PARAMETERS = ("start", "end", "group_by")
"""What `read_usage_query` reads."""


def read_usage_query(
    query: Mapping[str, str], now_s: float, *, tenant: str | None, by_tenant: bool
) -> UsageQuery:
    """From a query string's `start`, `end` (see `read_period`) and `group_by`, which is `model`
    unless it is given. Raises a 400 ApiError."""
    period = read_period(query, now_s, longest_s=_LONGEST_S)
    wanted = query.get("group_by", GroupBy.MODEL.value)
    if wanted not in _GROUPS:
        raise bad_request(f"group_by must be one of {', '.join(_GROUPS)}.", param="group_by")
    group_by = GroupBy(wanted)
    bucket_s = group_by.bucket_s
    if bucket_s is not None and (period.end_s - period.start_s) / bucket_s > _MOST_BUCKETS:
        raise bad_request(
            f"From start to end there may be at most {_MOST_BUCKETS} {group_by}s.", param="group_by"
        )
    return UsageQuery(period.start_s, period.end_s, group_by, tenant, by_tenant)


async def usage_answer(book: LedgerBook | None, query: UsageQuery, now_s: float) -> dict[str, Any]:
    """The whole answer. Raises ApiError: 503 where the ledger cannot be asked, 400 where there
    would be too many groups."""
    book = opened(book)
    try:
        groups, total = await book.usage(query, replace(query, group_by=None, by_tenant=False))
    except LedgerUnavailable:
        raise ledger_unavailable() from None
    except TooManyGroups:
        raise bad_request(
            f"There are more than {MOST_GROUPS} groups: ask for less time, or for one tenant.",
            param="start",
        ) from None
    return {
        "object": "usage",
        "start": query.start_s,
        "end": query.end_s,
        "group_by": query.group_by,
        "data": [usage_card(each, query, now_s) for each in groups],
        "total": usage_card(total[0], replace(query, group_by=None), now_s) if total else None,
    }


def usage_card(usage: Usage, query: UsageQuery, now_s: float) -> dict[str, Any]:
    """One group."""
    cached = {
        "device": usage.cached_device_tokens,
        "dram": usage.cached_dram_tokens,
        "redis": usage.cached_redis_tokens,
    }
    seconds = _seconds(usage, query, now_s)
    return {
        **_name(usage, query),
        "requests": {
            "total": sum(usage.requests.values()),
            "by_outcome": dict(sorted(usage.requests.items())),
        },
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": {"total": sum(cached.values()), **cached},
        "written_tokens": usage.written_tokens,
        "output_tokens": usage.output_tokens,
        "cost_usd": usd_text(usage.cost_nusd),
        "cost_nusd": usage.cost_nusd,
        "storage": {
            "token_hours": usage.token_hours,
            "cost_usd": usd_text(usage.storage_nusd),
            "cost_nusd": usage.storage_nusd,
        },
        "slo": {
            "promised": usage.promised,
            "met": usage.met,
            "attainment": usage.met / usage.promised if usage.promised else None,
            "goodput_rps": usage.met / seconds if seconds > 0 else 0.0,
        },
        "latency_ms": {
            "ttft": _milliseconds(usage.ttft),
            "tpot": _milliseconds(usage.tpot),
            "publish": _milliseconds(usage.publish),
        },
    }


def opened(book: LedgerBook | None) -> LedgerBook:
    """The ledger; a 503 ApiError while there is none."""
    if book is None:
        raise ledger_unavailable()
    return book


def ledger_unavailable() -> ApiError:
    """503: the database does not answer."""
    return unavailable(
        "The ledger's database does not answer in time.",
        code="ledger_unavailable",
        retry_after_s=_RETRY_AFTER_S,
    )


def _name(usage: Usage, query: UsageQuery) -> dict[str, Any]:
    name: dict[str, Any] = {} if usage.tenant is None else {"tenant": usage.tenant}
    if query.group_by is not None:
        field = query.group_by.value if query.group_by.bucket_s is None else "start"
        name[field] = usage.group
    return name


def _seconds(usage: Usage, query: UsageQuery, now_s: float) -> float:
    """How much of the group's time is part of the question and has passed."""
    period = Period(query.start_s, min(query.end_s, now_s))
    if query.group_by is not None and (bucket_s := query.group_by.bucket_s) is not None:
        begin_s = float(usage.group or 0)
        period = Period(max(period.start_s, begin_s), min(period.end_s, begin_s + bucket_s))
    return period.end_s - period.start_s


def _milliseconds(percentiles: Percentiles) -> dict[str, float] | None:
    if not percentiles.values:
        return None
    return {f"p{percent}": round(s * 1e3, 3) for percent, s in percentiles.values.items()}
