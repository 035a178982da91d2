"""Credit of classes that are held back, and the turns that it buys."""

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.floors import FLOOR_SHARE, ClassFloors, Served

GRANT = 100.0


def step(floors: ClassFloors, served: dict[int, int], held_back: set[int]) -> None:
    floors.step(Served(served, {}), held_back)


def test_a_turn_is_earned_by_what_the_more_urgent_are_served():
    floors = ClassFloors(GRANT)
    for _ in range(39):
        step(floors, {0: 50}, {2})
    assert floors.due() == []
    step(floors, {0: 50}, {2})
    assert floors.due() == [2]
    assert floors.take(2) == GRANT
    assert floors.due() == []


def test_the_most_urgent_class_earns_nothing():
    floors = ClassFloors(GRANT)
    for _ in range(1000):
        step(floors, {0: 50, 1: 50, 2: 50}, {0})
    assert floors.credit(0) == 0.0


def test_what_nobody_asked_for_earns_nothing():
    floors = ClassFloors(GRANT)
    for _ in range(1000):
        step(floors, {0: 500}, {3, 1_000_000})
    assert floors.due() == []


def test_who_is_served_beside_the_others_earns_less():
    floors = ClassFloors(GRANT)
    for _ in range(1000):
        step(floors, {0: 100, 1: 5}, {1})
    assert floors.credit(1) == 0.0
    for _ in range(50):
        floors.step(Served({0: 100, 1: 5}, {1: 5.0}), {1})
    assert floors.credit(1) == 250.0


def test_nothing_is_saved_up_while_nobody_is_held_back():
    floors = ClassFloors(GRANT)
    for _ in range(100):
        step(floors, {0: 100}, {1})
    step(floors, {0: 100}, set())
    assert floors.credit(1) == 0.0


def test_credit_is_bounded():
    floors = ClassFloors(GRANT)
    for _ in range(10_000):
        step(floors, {0: 100}, {1})
    assert floors.credit(1) == 8 * GRANT


def test_what_is_left_of_a_turn_comes_back():
    floors = ClassFloors(GRANT)
    for _ in range(30):
        step(floors, {0: 100}, {1})
    floors.take(1)
    floors.give_back(1, 70.0)
    assert floors.credit(1) == 150.0 - GRANT + 70.0


def full(floors: ClassFloors) -> None:
    for _ in range(200):
        step(floors, {0: 100}, {2})


def test_the_door_is_closed_only_with_all_credit_and_until_the_turn_is_taken():
    floors = ClassFloors(GRANT)
    step(floors, {0: 10_000}, {2})
    assert floors.due() == [2]
    assert not floors.closes_door(2)
    full(floors)
    for _ in range(20):
        assert floors.closes_door(2)
        step(floors, {0: 1}, {2})
    floors.take(2)
    full(floors)
    assert not floors.closes_door(2)


def test_the_door_then_stays_open_in_proportion():
    floors = ClassFloors(GRANT)
    full(floors)
    for _ in range(20):
        assert floors.closes_door(2)
        step(floors, {0: 1}, {2})
    floors.take(2)
    open_steps = 0
    while not floors.closes_door(2):
        step(floors, {0: 100}, {2})
        open_steps += 1
    assert open_steps == 16 * 20


def test_a_door_that_nobody_stands_at_is_open():
    floors = ClassFloors(GRANT)
    full(floors)
    assert floors.closes_door(2)
    step(floors, {0: 1}, {2})
    step(floors, {0: 1}, set())  # it has left; its class was not asked about in this step
    full(floors)
    assert floors.credit(2) == 8 * GRANT
    assert floors.closes_door(2)
    step(floors, {0: 1}, {2})
    step(floors, {0: 1}, {2})
    assert not floors.closes_door(2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 3), st.integers(0, 300), max_size=4),
            st.sets(st.integers(0, 3)),
        ),
        max_size=120,
    )
)
def test_turns_never_cost_more_than_their_share(steps):
    floors = ClassFloors(GRANT)
    more_urgent = taken = 0.0
    for served, held_back in steps:
        step(floors, served, held_back)
        more_urgent += sum(units for priority, units in served.items() if priority < 2)
        if 2 in floors.due():
            taken += floors.take(2)
        for priority in range(4):
            assert 0.0 <= floors.credit(priority) <= 8 * GRANT
    assert taken <= FLOOR_SHARE * more_urgent + 1e-6
