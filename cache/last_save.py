"""At the end: what device and DRAM hold is written to Redis, as far as time allows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from cache.block import BlockKey
from cache.demotion import BLOCKS_AT_ONCE, Demotion
from cache.redis_store import Probe
from cache.tiers import Tiers

_BATCH_BLOCKS = 64
_POLL_S = 0.0005


def save_all(tiers: Tiers, demotion: Demotion, timeout_s: float) -> None:
    """The step loop has stopped: this thread waits in its place.

    The most valuable blocks come last: Redis, when it is full, gives up what is oldest.
    """
    dram = tiers.dram
    deadline_s = time.monotonic() + timeout_s
    _drain(tiers, 0, deadline_s)
    tiers.notice_new_redis()
    if dram is None or not tiers.redis_up:
        return
    now_s = tiers.now_s()
    slots = dram.pool.cached_in_order(now_s)
    pages = tiers.device.cached_in_order(now_s)
    held = [dram.pool.key_of(slot) for slot in slots]
    held += [tiers.device.key_of(page) for page in pages]
    _check_stored(tiers, [key for key in held if key is not None and tiers.is_stored(key)])
    _drain(tiers, 0, deadline_s)
    room = max(1, demotion.room_for_stores)
    size = max(1, min(_BATCH_BLOCKS, room // 2))
    under_way = min(_BATCH_BLOCKS, room - size) // BLOCKS_AT_ONCE
    for batch in _batches(slots, size):
        demotion.store(batch)
        _drain(tiers, under_way, deadline_s)
    for batch in _batches(pages, size):
        demotion.store_pages(batch)
        _drain(tiers, under_way, deadline_s)
    _drain(tiers, 0, deadline_s)


def _check_stored(tiers: Tiers, keys: Sequence[BlockKey]) -> None:
    """Ask Redis whether it still holds these: it may have pushed them out, or been emptied."""
    assert tiers.redis is not None

    def answered(probe: Probe) -> None:
        tiers.mail.post(lambda: settle(probe))

    def settle(probe: Probe) -> None:
        tiers.in_flight -= 1
        for key, there in zip(keys, probe.present, strict=False):
            if not there:
                tiers.note_stored(key, None)

    tiers.in_flight += 1
    tiers.redis.probe(keys, answered)


def _drain(tiers: Tiers, in_flight: int, deadline_s: float) -> None:
    """Until at most so many transfers are under way, or time is up."""
    while tiers.in_flight > in_flight and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        tiers.mail.deliver()
    tiers.mail.deliver()


def _batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))
