"""Student's t against the tables of textbooks."""

from __future__ import annotations

import math

import pytest

from loadtest.stats import student


@pytest.mark.parametrize(
    ("confidence", "degrees", "t"),
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 4, 2.776),
        (0.95, 5, 2.571),
        (0.99, 9, 3.250),
        (0.95, 30, 2.042),
        (0.95, 120, 1.980),
    ],
)
def test_quantiles_are_those_of_the_tables(confidence: float, degrees: int, t: float) -> None:
    assert student.quantile(confidence, degrees) == pytest.approx(t, abs=6e-4)


def test_one_degree_of_freedom_is_cauchys_distribution() -> None:
    for t in (0.0, 0.5, 1.0, 7.0):
        assert student.within(t, 1) == pytest.approx(2 / math.pi * math.atan(t))


@pytest.mark.parametrize("degrees", [1, 2, 3, 8, 41])
def test_p_is_what_the_quantile_leaves(degrees: int) -> None:
    assert student.two_sided_p(-student.quantile(0.9, degrees), degrees) == pytest.approx(0.1)
    assert student.two_sided_p(0.0, degrees) == 1.0
    assert student.two_sided_p(math.inf, degrees) == 0.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="degree of freedom"):
        student.within(1.0, 0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        student.quantile(1.0, 3)
