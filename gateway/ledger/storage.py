"""What keeping named prefixes costs, as rows of the ledger.

A prefix is charged for the time between its making and its end, in one row for each hour (UTC) that
it touches, once that hour or the prefix is over. The row's id says which prefix and which hour, so
that several gateways, or one that was restarted, may all note the same row and it is charged once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import structlog

from gateway.ledger.row import Ledger, LedgerRow
from gateway.named_cache import NamedCache, Place
from policies.pricing import Price

_log = structlog.get_logger("forebay.ledger")

_HOUR_S = 3600
_LOOK_S = 60.0
_LOOK_BACK_S = 2 * _HOUR_S
"""How far back one is charged that was made before this process saw it, in whole hours: what a
restart has left out. Hours that were charged already are charged once, and one during which no
gateway ran, or there was no price, is mostly not charged."""


class Kept(NamedTuple):
    """A named prefix that is kept now, and whose it is."""

    tenant: str
    cache: NamedCache


ListKept = Callable[[], Awaitable[Iterable[Kept] | None]]
"""Every tenant's named prefixes as all gateways have them; None where they cannot be asked, and
this one's knowledge may be old."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A prefix as it was when it was last seen, and until when it is charged."""

    kept: Kept
    seen_s: float
    charged_s: float


class StorageMeter:
    """Notes what named prefixes cost to keep. Belongs to the event loop."""

    def __init__(
        self,
        list_kept: ListKept,
        ledger: Ledger,
        price_of: Callable[[str], Price],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`price_of` knows models by their own names, `clock` gives Unix seconds."""
        self._list_kept = list_kept
        self._ledger = ledger
        self._price_of = price_of
        self._clock = clock
        self._known: dict[tuple[Place, float], _Known] = {}

    async def run(self, every_s: float = _LOOK_S) -> None:
        """Look again and again, until cancelled; not at once, when there are other things to do."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - whatever it was: nobody else charges for them
                _log.exception("named prefixes could not be charged")

    async def look(self) -> None:
        """See what is kept now, and charge for what is over. One that was deleted is charged until
        it was last seen."""
        found = await self._list_kept()
        if found is None:
            return
        now_s = self._clock()
        gone = dict(self._known)
        for kept in found:
            key = (kept.cache.place, kept.cache.created_s)
            before = gone.pop(key, None)
            self._known[key] = self._charge(_seen(kept, now_s, before), until_s=now_s, over=False)
        for key, known in gone.items():
            self._charge(known, until_s=_end_s(known, now_s), over=True)
            del self._known[key]

    def end_all(self) -> None:
        """Charge for everything up to now: where named prefixes end with the process."""
        now_s = self._clock()
        for known in self._known.values():
            end_s = min(known.kept.cache.expires_s, now_s)
            self._charge(known, until_s=end_s, over=True)
        self._known.clear()

    def _charge(self, known: _Known, *, until_s: float, over: bool) -> _Known:
        """Note the hours that are complete, and the last one if it is `over`."""
        until_s = min(until_s, known.kept.cache.expires_s)
        over = over or until_s >= known.kept.cache.expires_s
        begin_s = known.charged_s
        while begin_s < until_s:
            hour = int(begin_s // _HOUR_S)
            end_s = min(float((hour + 1) * _HOUR_S), until_s)
            if end_s < (hour + 1) * _HOUR_S and not over:
                break
            self._note(known.kept, hour, begin_s, end_s)
            begin_s = end_s
        return _Known(known.kept, known.seen_s, begin_s)

    def _note(self, kept: Kept, hour: int, begin_s: float, end_s: float) -> None:
        cache = kept.cache
        seconds = round(end_s - begin_s)
        cost_nusd = self._price_of(cache.model).storage_nusd(cache.tokens, seconds)
        if cost_nusd == 0:
            return
        self._ledger.note(
            LedgerRow(
                id=f"storage:{_digest(cache)}:{hour}",
                request_id="",
                started_s=begin_s,
                finished_s=end_s,
                tenant=kept.tenant,
                key="",
                model=cache.model,
                endpoint="caches",
                service_class="",
                outcome="success",
                status=None,
                streamed=False,
                prompt_tokens=0,
                cached_device_tokens=0,
                cached_dram_tokens=0,
                cached_redis_tokens=0,
                written_tokens=0,
                output_tokens=0,
                cost_nusd=cost_nusd,
                e2e_s=0.0,
                kind="storage",
                token_hours=cache.tokens * seconds / _HOUR_S,
            )
        )


def _seen(kept: Kept, now_s: float, before: _Known | None) -> _Known:
    if before is not None:
        return _Known(kept, now_s, before.charged_s)
    oldest_hour_s = (now_s - _LOOK_BACK_S) // _HOUR_S * _HOUR_S
    return _Known(kept, now_s, max(kept.cache.created_s, oldest_hour_s))


def _end_s(known: _Known, now_s: float) -> float:
    """When one that is no longer kept ended."""
    expires_s = known.kept.cache.expires_s
    return expires_s if expires_s <= now_s else known.seen_s


def _digest(cache: NamedCache) -> str:
    """Names one life of a name: one that is deleted and made again is another."""
    owner, name = cache.place
    said = b"%b%b%d\0%b" % (
        owner.tenant,
        owner.scope,
        round(cache.created_s * 1e3),
        name.encode("utf-8", "surrogatepass"),
    )
    return blake2b(said, digest_size=16).hexdigest()
