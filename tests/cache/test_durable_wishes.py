"""Blocks that are to last in Redis: which are tried when."""

from __future__ import annotations

import pytest

from cache.block import NOBODY, BlockKey
from cache.durable_wishes import DurableWishes


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]), b"", b"", owner=NOBODY)


def links(wishes: DurableWishes, now_s: float) -> list[int]:
    return [each.key.link[0] for each in wishes.open(now_s)]


def test_what_was_tried_is_open_again_after_a_second_behind_what_is_open_then() -> None:
    wishes = DurableWishes()
    for number in (1, 2):
        wishes.add(key(number), 60.0, 0.0, 0)
    wishes.tried(key(1), 0.0)
    assert links(wishes, 0.5) == [2]
    wishes.tried(key(2), 0.5)
    wishes.add(key(3), 60.0, 0.6, 0)
    assert links(wishes, 0.9) == [3]
    assert links(wishes, 1.0) == [3, 1]
    wishes.add(key(4), 60.0, 1.1, 0)
    assert links(wishes, 1.5) == [3, 1, 4, 2]
    assert len(wishes) == 4
    assert links(wishes, 60.5) == [3, 4]  # the others are over
    assert len(wishes) == 2


def test_what_is_wished_for_anew_is_open_at_once_and_what_is_there_is_wished_for_no_more() -> None:
    wishes = DurableWishes()
    for number in (1, 2):
        wishes.add(key(number), 60.0, 0.0, 0)
        wishes.tried(key(number), 0.0)
    wishes.add(key(1), 90.0, 0.1, 0)
    wishes.add(key(2), 30.0, 0.1, 0)  # less than is wished for already
    assert links(wishes, 0.2) == [1]
    wishes.stored(key(1), 60.0)
    wishes.stored(key(2), 60.0)
    assert links(wishes, 2.0) == [1]
    wishes.withdraw(key(1))
    assert not wishes


def test_beyond_the_most_what_was_in_vain_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cache.durable_wishes._MOST", 3)
    wishes = DurableWishes()
    for number in (1, 2, 3):
        wishes.add(key(number), 60.0, 0.0, 0)
    wishes.tried(key(2), 0.0)
    for number in (4, 5):
        wishes.add(key(number), 60.0, 0.0, 0)
    assert links(wishes, 2.0) == [3, 4, 5]
