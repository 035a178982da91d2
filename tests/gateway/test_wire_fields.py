"""What JSON numbers say, read for many at once as for each alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.wire.fields import as_integer, as_token_ids

NUMBERS = st.one_of(st.integers(-2, 1 << 70), st.floats(-3, 1e300, allow_nan=False))
VALUES = st.one_of(NUMBERS, st.booleans(), st.none(), st.text(max_size=2), st.just([1]))


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.lists(st.integers(0, 9)), st.lists(NUMBERS), st.lists(VALUES, max_size=4)))
def test_ids_are_read_as_each_integer_is(values: list[object]) -> None:
    alone = [as_integer(value) for value in values]
    expected = [token for token in alone if token is not None and token >= 0]
    found = as_token_ids(values)
    assert found == (expected if len(expected) == len(values) else None)
    assert found is None or all(type(token) is int for token in found)
