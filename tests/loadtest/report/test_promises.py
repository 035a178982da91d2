"""Promises in words and as limits of charts."""

from __future__ import annotations

from dataclasses import replace

from loadtest.report.promises import common_limit_ms, limits_ms, promise_of, promised_at
from policies.slo import Slo
from tests.loadtest.report.made_runs import ACME, FREE


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def test_a_promise_in_words() -> None:
    assert plain(promise_of(ACME)) == "TTFT ≤ 500 ms, TPOT ≤ 120 ms"
    assert plain(promise_of(replace(ACME, slo=Slo(ttft_s=2.5)))) == "TTFT ≤ 2.5 s"
    assert promise_of(FREE) == "–"


def test_a_limit_is_named_only_where_all_share_it() -> None:
    assert common_limit_ms([0.5, None, 0.5]) == 500.0
    assert common_limit_ms([0.5, 0.6]) is None
    assert common_limit_ms([None]) is None


def test_a_chart_marks_few_limits_or_none() -> None:
    assert limits_ms([0.5, None, 0.2, 0.5]) == [200.0, 500.0]
    assert limits_ms([0.1, 0.2, 0.3, 0.4]) == []
    (mark,) = promised_at([2000.0])
    assert (mark.value, plain(mark.label), mark.promised) == (2000.0, "promised 2 s", True)
