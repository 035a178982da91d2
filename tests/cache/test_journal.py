"""Changes of the tiers, told as differences."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cache import journal as journal_module
from cache.block import Tier
from cache.block_events import BlockEvents, TierChange
from cache.journal import Journal
from tests.cache.event_mirror import Mirror


def test_batches_are_numbered_from_one_and_nothing_is_no_batch():
    journal = Journal(7)
    assert journal.take() is None
    assert not journal
    journal.of(Tier.DEVICE).stored(b"a")
    journal.of(Tier.REDIS).stored(b"b")
    assert journal
    changes = (TierChange(Tier.DEVICE, (b"a",)), TierChange(Tier.REDIS, (b"b",)))
    assert journal.take() == BlockEvents(7, 1, changes)
    assert journal.take() is None
    journal.of(Tier.DEVICE).removed(b"a")
    assert journal.take() == BlockEvents(7, 2, (TierChange(Tier.DEVICE, (), (b"a",)),))


def test_what_comes_and_goes_between_two_batches_is_not_told():
    journal = Journal(1)
    device = journal.of(Tier.DEVICE)
    device.stored(b"a")
    device.removed(b"a")
    assert journal.take() is None
    device.stored(b"b")
    journal.take()
    device.removed(b"b")
    device.stored(b"b")
    assert not journal
    assert journal.take() is None


def test_a_snapshot_voids_what_was_to_be_told_and_the_next_batch_follows_it():
    journal = Journal(3)
    device = journal.of(Tier.DEVICE)
    device.stored(b"a")
    device.stored(b"b")
    held = {Tier.DEVICE: [b"a", b"b"], Tier.DRAM: []}
    snapshot = journal.snapshot(held)
    assert snapshot == BlockEvents(3, 1, (TierChange(Tier.DEVICE, (b"a", b"b")),), snapshot=True)
    assert journal.take() is None
    device.removed(b"a")
    assert journal.take() == BlockEvents(3, 2, (TierChange(Tier.DEVICE, (), (b"a",)),))


def test_much_is_told_in_parts_and_changes_while_it_is(monkeypatch):
    monkeypatch.setattr(journal_module, "LINKS_AT_ONCE", 3)
    journal, mirror = Journal(1), Mirror()
    device, dram = journal.of(Tier.DEVICE), journal.of(Tier.DRAM)
    for index in range(5):
        device.stored(b"%d" % index)
    dram.stored(b"x")
    mirror.apply(journal.take())
    assert mirror.held[Tier.DEVICE] == {b"0", b"1", b"2"}
    device.removed(b"4")  # was never told
    device.removed(b"1")
    second = journal.take()
    assert [len(change.stored) + len(change.removed) for change in second.changes] == [2, 1]
    mirror.apply(second)
    assert journal.take() is None
    mirror.check(Tier.DEVICE, [b"0", b"2", b"3"])
    mirror.check(Tier.DRAM, [b"x"])


@pytest.mark.parametrize("at_once", [1, 2, 4096])
def test_a_listener_ends_up_with_what_is_held(monkeypatch, at_once):
    monkeypatch.setattr(journal_module, "LINKS_AT_ONCE", at_once)
    action = st.one_of(
        st.tuples(st.sampled_from(list(Tier)), st.integers(0, 5)),
        st.sampled_from(["take", "snapshot"]),
    )

    @settings(max_examples=60, deadline=None)
    @given(st.lists(action, max_size=60))
    def run(actions):
        journal, mirror = Journal(9), Mirror()
        held = {tier: {} for tier in Tier}
        for each in actions:
            if each == "snapshot":
                mirror.apply(journal.snapshot(held))
                assert not journal
            elif each == "take":
                if (events := journal.take()) is not None:
                    told = sum(len(c.stored) + len(c.removed) for c in events.changes)
                    assert 0 < told <= at_once
                    mirror.apply(events)
            else:  # what is held goes, what is not comes
                tier, link = each[0], bytes([each[1]])
                if link in held[tier]:
                    del held[tier][link]
                    journal.of(tier).removed(link)
                else:
                    held[tier][link] = None
                    journal.of(tier).stored(link)
        while (events := journal.take()) is not None:
            mirror.apply(events)
        for tier in Tier:
            mirror.check(tier, held[tier])

    run()
