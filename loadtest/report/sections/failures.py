"""What failed, and what was said about it."""

from __future__ import annotations

from loadtest.record import Outcome
from loadtest.report.blocks import group, table
from loadtest.report.cautions import MEANINGS
from loadtest.report.labels import Shown
from loadtest.report.markup import Html, element
from loadtest.report.quantities import count, percent
from loadtest.tables import Table

_MOST_REASONS = 20
_LONGEST_REASON = 300


def failures(shown: Shown) -> Html:
    """How requests ended, and the reasons that were given, the most frequent first."""
    whole = shown.summary.whole
    outcomes = tuple(
        (f"{kind.value}: {MEANINGS[kind]}", count(number), percent(number / whole.requests))
        for kind, number in sorted(whole.outcomes.items(), key=lambda item: -item[1])
        if number
    )
    parts = [table(Table(("outcome", "requests", "share"), outcomes), "How they ended")]
    reasons = tuple(
        (_short(reason), count(number)) for reason, number in shown.summary.reasons[:_MOST_REASONS]
    )
    if reasons:
        more = len(shown.summary.reasons) - len(reasons)
        caption = "Reasons of failures" + (f"; {more:,} rarer ones are left out" if more else "")
        parts.append(table(Table(("reason", "requests"), reasons), caption))
    elif whole.outcomes.get(Outcome.OK, 0) == whole.requests:
        parts.append(element("p", "Nothing failed.", class_="intro"))
    return group("Outcomes", *parts)


def _short(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else reason[: _LONGEST_REASON - 1] + "…"
