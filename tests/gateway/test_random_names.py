"""Names are of one length, and each is given once."""

from __future__ import annotations

from gateway.random_names import RandomNames


def test_every_name_is_another():
    names = RandomNames(3)
    given = [names.next() for _ in range(300)]
    assert all(len(name) == 6 and int(name, 16) >= 0 for name in given)
    assert len(set(given)) > 295  # of 16 million


def test_two_who_give_names_give_different_ones():
    assert RandomNames(12).next() != RandomNames(12).next()
