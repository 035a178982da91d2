"""Who goes where more want to wait than may."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.slo.line import Waiter
from gateway.slo.waiting_room import WaitingRoom
from policies.admission import ADMITTED


async def waiter(
    flow: bytes = b"a",
    *,
    priority: int = 1,
    tokens: int = 1,
    weight: float = 1.0,
    due_s: float = math.inf,
) -> Waiter:
    """Its turn is a future of the loop that runs now."""
    return Waiter(priority, flow, weight, due_s, tokens, lambda: ADMITTED, ADMITTED)


def full(most: int, most_tokens: int, *waiting: Waiter) -> WaitingRoom:
    """A room in which these wait, in the order in which they came."""
    room = WaitingRoom(most, most_tokens)
    for each in waiting:
        room.add(each)
    return room


async def several(count: int, flow: bytes, **more: float) -> list[Waiter]:
    return [await waiter(flow, **more) for _ in range(count)]  # type: ignore[arg-type]  # by name


async def test_nobody_goes_while_there_is_room() -> None:
    room = full(4, 100, *await several(3, b"a"))
    assert room.who_goes(await waiter(tokens=97)) == []
    assert WaitingRoom(4, 100).who_goes(await waiter(tokens=101)) is None


async def test_the_less_urgent_go_first_what_is_due_last_before_the_others() -> None:
    early, late = await waiter(due_s=1.0, priority=2), await waiter(due_s=2.0, priority=2)
    room = full(5, 100, late, early, *await several(3, b"b"))
    assert room.who_goes(await waiter(b"a")) == [late]
    assert room.who_goes(await waiter(b"a", priority=3)) is None
    room.remove(late)
    room.add(await waiter(b"b"))
    assert room.who_goes(await waiter(b"a", tokens=2)) == [early]


async def test_nobody_goes_for_one_that_cannot_wait_all_the_same() -> None:
    room = full(10, 100, await waiter(priority=2, tokens=10), await waiter(priority=0, tokens=90))
    assert room.who_goes(await waiter(tokens=20)) is None


async def test_weights_say_how_large_parts_are() -> None:
    heavy, light = await several(5, b"heavy", weight=2.0), await several(3, b"light")
    room = full(8, 1000, *heavy, *light)
    assert room.who_goes(await waiter(b"light")) is None
    assert room.who_goes(await waiter(b"heavy", weight=2.0)) is None
    assert room.who_goes(await waiter(b"new")) == [light[-1]]


async def test_long_prompts_are_a_large_part() -> None:
    long = await several(2, b"long", tokens=450)
    room = full(100, 1000, *long)
    assert room.who_goes(await waiter(b"short", tokens=200)) == [long[-1]]
    assert room.who_goes(await waiter(b"long", tokens=200)) is None


ARRIVALS = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 2), st.integers(1, 40)),
    max_size=60,
)


@settings(max_examples=30, deadline=None)
@given(ARRIVALS)
async def test_the_room_is_never_too_full_and_no_more_is_cleared_than_needed(
    arrivals: list[tuple[bytes, int, int]],
) -> None:
    room = WaitingRoom(6, 100)
    waiting: dict[Waiter, None] = {}
    for flow, priority, tokens in arrivals:
        newcomer = await waiter(flow, priority=priority, tokens=tokens)
        leaving = room.who_goes(newcomer)
        if leaving is None:
            continue
        assert all(each.priority >= priority for each in leaving)
        assert not any(each.place == newcomer.place for each in leaving)
        for each in leaving:
            del waiting[each]
            room.remove(each)
        waiting[newcomer] = None
        room.add(newcomer)
        assert len(waiting) <= 6
        assert sum(each.tokens for each in waiting) <= 100
        if leaving:
            kept = {**waiting, leaving[-1]: None}
            assert len(kept) > 6 or sum(each.tokens for each in kept) > 100


@pytest.mark.parametrize("crowd", [6, 60])
async def test_a_crowd_of_one_leaves_the_others_their_parts(crowd: int) -> None:
    room = WaitingRoom(6, 10_000)
    waiting: dict[Waiter, None] = {}
    for flow in [b"crowd"] * crowd + [b"a", b"b", b"a", b"b", b"a", b"crowd"]:
        newcomer = await waiter(flow)
        for each in (leaving := room.who_goes(newcomer)) or ():
            del waiting[each]
            room.remove(each)
        if leaving is not None:
            waiting[newcomer] = None
            room.add(newcomer)
    assert Counter(each.flow for each in waiting) == {b"crowd": 2, b"a": 2, b"b": 2}
