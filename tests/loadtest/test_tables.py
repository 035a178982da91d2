"""How figures read in tables."""

from __future__ import annotations

import pytest

from loadtest.tables import number, percent


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (None, "–"),
        (0.0, "0.00"),
        (1234.5, "1,234"),
        (99.94, "99.9"),
        (-9.876, "-9.88"),
        (0.47, "0.47"),
        (0.0999, "0.100"),
        (0.0041, "0.0041"),
        (-0.00064, "-0.00064"),
        (3e-17, "0.00"),
    ],
)
def test_a_figure_is_as_long_as_it_has_to_be(value: float | None, read: str) -> None:
    assert number(value) == read


@pytest.mark.parametrize(
    ("share", "read"),
    [
        (None, "–"),
        (0.0, "0.0 %"),
        (1.0, "100.0 %"),
        (2999 / 3000, "> 99.9 %"),
        (1 / 3000, "< 0.1 %"),
        (0.9994, "99.9 %"),
        (1.2, "120.0 %"),
    ],
)
def test_nearly_all_is_not_all_and_hardly_anything_is_not_nothing(
    share: float | None, read: str
) -> None:
    assert percent(share) == read
