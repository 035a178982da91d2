"""Rows that have been kept long enough are deleted, a few at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random

import structlog

from gateway.ledger.table import LedgerTable, LedgerUnavailable

_log = structlog.get_logger("forebay.ledger")

_ROUND_S = 600.0
_ROWS_AT_ONCE = 500
_PAUSE_S = 0.1


async def keep_ageing(
    table: LedgerTable, retention_s: Callable[[], float], *, round_s: float = _ROUND_S
) -> None:
    """Delete what is too old now and then, until cancelled. Several gateways may: what one has
    deleted, others do not find."""
    chance = Random()  # gateways that started together take turns
    while True:
        await asyncio.sleep(round_s * chance.uniform(0.5, 1.0))
        try:
            deleted = await delete_old(table, time.time() - retention_s())
        except LedgerUnavailable:
            continue  # the writer says so
        if deleted:
            _log.info("old rows of the ledger are deleted", rows=deleted)


async def delete_old(
    table: LedgerTable, before_s: float, *, rows_at_once: int = _ROWS_AT_ONCE
) -> int:
    """Delete rows of requests that were over before this Unix time, in transactions so short that
    nobody waits for them; how many there were. Raises LedgerUnavailable."""
    total = 0
    while True:
        deleted = await table.delete_before(before_s, most=rows_at_once)
        total += deleted
        if deleted < rows_at_once:
            return total
        await asyncio.sleep(_PAUSE_S)
