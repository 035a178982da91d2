"""Figures with their units."""

from __future__ import annotations

import pytest

from loadtest.report import quantities


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("ms", "words", "at_tick"),
    [
        (0.0, "0 ms", "0"),
        (0.42, "0.42 ms", "0.42 ms"),
        (50.0, "50.0 ms", "50 ms"),
        (999.4, "999 ms", "999 ms"),
        (999.6, "1.00 s", "1 s"),
        (4100.0, "4.10 s", "4.1 s"),
        (100_000.0, "100 s", "100 s"),
        (300_000.0, "5.00 min", "5 min"),
        (7_200_000.0, "2.00 h", "2 h"),
    ],
)
def test_durations(ms: float, words: str, at_tick: str) -> None:
    assert plain(quantities.duration(ms)) == words
    assert plain(quantities.tick_duration(ms)) == at_tick


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "0 %"),
        (0.0001, "< 0.1 %"),
        (0.942, "94.2 %"),
        (0.9994, "99.9 %"),
        (0.9999, "> 99.9 %"),
        (1.0, "100 %"),
    ],
)
def test_what_is_not_quite_all_never_looks_like_it(share: float, words: str) -> None:
    assert plain(quantities.percent(share)) == words


def test_what_is_not_known_is_a_dash() -> None:
    for of in (
        quantities.duration,
        quantities.percent,
        quantities.figure,
        quantities.per_second,
        quantities.usd,
        quantities.size,
    ):
        assert of(None) == quantities.NONE


def test_other_units() -> None:
    assert plain(quantities.counted(1, "request")) == "1 request"
    assert plain(quantities.counted(1234, "request")) == "1,234 requests"
    assert quantities.usd(0.0123) == "$0.0123"
    assert quantities.usd(1234.5) == "$1,234.50"
    assert plain(quantities.size(3 * 2**20)) == "3.00 MiB"
    assert plain(quantities.target(0.999)) == "99.9 %"


def test_a_moment_that_is_none_stays_as_it_is() -> None:
    assert quantities.moment("2026-03-01T14:05:09+00:00") == "2026-03-01 14:05:09 UTC"
    assert quantities.moment("some day") == "some day"
