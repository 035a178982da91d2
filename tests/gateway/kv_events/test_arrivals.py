"""What a numbered message is, going by those before it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.kv_events.arrivals import Arrival, Arrivals


def test_in_order_from_anywhere() -> None:
    arrivals = Arrivals()
    for number in (5, 6, 7):
        assert arrivals.published(number) is Arrival.NEXT
        arrivals.take(number)
    assert arrivals.published(9) is Arrival.LATER
    assert arrivals.of(8) is Arrival.NEXT
    arrivals.take(8)
    assert arrivals.of(9) is Arrival.NEXT


def test_what_was_asked_for_comes_again_by_itself() -> None:
    arrivals = Arrivals()
    for number in range(4):
        assert arrivals.of(number) is Arrival.NEXT
        arrivals.take(number)
    assert arrivals.published(2) is Arrival.KNOWN
    assert arrivals.published(3) is Arrival.KNOWN
    assert arrivals.published(4) is Arrival.NEXT
    assert arrivals.published(4) is Arrival.RESTARTED
    assert arrivals.published(0) is Arrival.RESTARTED


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_every_message_is_taken_once_or_known_to_be_missing(
    fates: list[tuple[bool, bool]],
) -> None:
    """Each message arrives by itself or not; on a gap those before it are asked for, of which some
    have been lost for good."""
    arrivals, taken, given_up = Arrivals(), [], set()
    for number, (arrives, _) in enumerate(fates):
        if not arrives:
            continue
        arrival = arrivals.published(number)
        if arrival is Arrival.LATER:
            assert arrivals.taken is not None
            for missing in range(arrivals.taken + 1, number):
                if fates[missing][1] and arrivals.of(missing) is not Arrival.KNOWN:
                    arrivals.take(missing)
                    taken.append(missing)
                else:
                    given_up.add(missing)
        assert arrivals.of(number) is not Arrival.KNOWN
        arrivals.take(number)
        taken.append(number)
    assert taken == sorted(set(taken))
    if taken:
        assert set(range(taken[0], taken[-1] + 1)) == set(taken) | given_up
