"""The measurement itself: it has a line for each kind of traffic, and news stay small."""

from __future__ import annotations

import random

import pytest

from gateway.news.bench_news import _shared, main, measure


def test_a_line_for_each_kind_of_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    main(seconds=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == ["unique", "shared", "conversations"]
    assert all("kB/s" in line for line in lines)


def test_beginnings_that_are_shared_are_told_once() -> None:
    told_whole = 100 * 256 * 16
    rate, _, _ = measure(_shared(random.Random(0)), seconds=5)
    assert rate < told_whole / 4
