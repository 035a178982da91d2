"""The fit on its own: bounds, and what one kind of features says about another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.online_fit import OnlineFit, Trend


def fed(rows: list[tuple[list[float], float]], prior: tuple[float, ...]) -> OnlineFit:
    fit, trend = OnlineFit(prior), Trend()
    for features, value in rows:
        fit.observe(features, value, trend)
    return fit


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 1e6), min_size=3, max_size=3).map(lambda f: [1.0, *f]),
            st.floats(1e-7, 1e3),
        ),
        max_size=60,
    )
)
def test_coefficients_stay_positive_and_finite_on_any_input(rows):
    fit = fed(rows, (1e-2, 1e-3, 1e-4, 1e-6))
    assert all(0 < coefficient < np.inf for coefficient in fit.coefficients)


def test_a_cost_that_would_come_out_negative_is_bounded_and_the_rest_fits_without_it():
    rows = [([1.0, float(n)], 10.0 - n) for n in (1, 2, 3, 4)] * 50  # dearer the less there is
    fit = fed(rows, (1.0, 1.0))
    assert fit.coefficients[1] == pytest.approx(0, abs=1e-3)
    assert 6 < fit.coefficients[0] < 9


def test_a_bounded_coefficient_comes_back_when_the_data_say_so():
    falling = [([1.0, float(n)], 10.0 - n) for n in (1, 2, 3, 4)] * 20
    rising = [([1.0, float(n)], 5.0 + n) for n in (1, 2, 3, 4)] * 200
    fit = fed(falling + rising, (1.0, 1.0))
    assert fit.coefficients == pytest.approx((5.0, 1.0), rel=0.2)


def test_a_direction_that_is_not_seen_any_more_is_not_forgotten():
    rows = [([1.0, 0.0], 2.0), ([0.0, 1.0], 3.0)] * 50 + [([1.0, 0.0], 2.0)] * 5000
    assert fed(rows, (1.0, 1.0)).coefficients == pytest.approx((2.0, 3.0), rel=0.01)


def test_a_prior_of_zero_is_refused():
    with pytest.raises(ValueError, match="positive"):
        OnlineFit((1.0, 0.0))


def test_surprises_in_a_row_are_believed_and_a_single_one_is_bounded():
    trend = Trend()
    for _ in range(20):
        assert trend.judge(1.0, 1.0) == (1.0, False)
    assert trend.judge(1.0, 5.0) == (1.5, False)
    assert trend.judge(1.0, 0.1) == (pytest.approx(1 / 1.5), False)
    judged = [trend.judge(1.0, 5.0) for _ in range(5)]
    assert judged[0] == (1.5, False)
    assert judged[-1] == (5.0, True)


def test_the_error_is_a_mean_over_recent_predictions():
    trend = Trend()
    for _ in range(1000):
        trend.judge(1.5, 1.0)
    assert trend.error == pytest.approx(0.5)
    for _ in range(1000):
        trend.judge(1.0, 1.0)
    assert trend.error < 0.01
