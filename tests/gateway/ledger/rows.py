"""Rows of the ledger, and a ledger on either kind of database."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from sqlalchemy import select

from gateway.database.opening import Database
from gateway.database.schema import requests
from gateway.ledger.book import LedgerBook
from gateway.ledger.opening import open_ledger
from gateway.ledger.row import LedgerRow
from gateway.ledger.writer import WriterTerms
from gateway.state_dir import StateDir
from tests.gateway.database.both import Place

QUICK = WriterTerms(interval_s=0.02)
_numbers = count()


def row(**fields: Any) -> LedgerRow:
    """One request of acme's, just over, unlike any other."""
    number = next(_numbers)
    finished_s = fields.get("finished_s", time.time())
    values: dict[str, Any] = {
        "id": f"row-{number:08d}",
        "request_id": f"req-{number}",
        "started_s": finished_s - 1.0,
        "finished_s": finished_s,
        "tenant": "acme",
        "key": "key-1",
        "model": "m",
        "endpoint": "chat",
        "service_class": "standard",
        "outcome": "success",
        "status": 200,
        "streamed": False,
        "prompt_tokens": 100,
        "cached_device_tokens": 30,
        "cached_dram_tokens": 20,
        "cached_redis_tokens": 10,
        "written_tokens": 5,
        "output_tokens": 40,
        "cost_nusd": 1000,
        "e2e_s": 1.0,
        "ttft_s": 0.2,
        "tpot_s": 0.01,
        "met_slo": True,
        "replica": "m/0",
    }
    return LedgerRow(**{**values, **fields})


@dataclass(frozen=True)
class Opened:
    """A database with a ledger on it."""

    database: Database
    ledger: LedgerBook

    async def stored(self) -> list[LedgerRow]:
        """What the database has, in the order of ids."""
        return await stored(self.database)


async def stored(database: Database) -> list[LedgerRow]:
    async with database.read() as connection:
        found = await connection.execute(select(requests).order_by(requests.c.id))
        return [LedgerRow(**each) for each in found.mappings()]


@asynccontextmanager
async def opened(
    place: Place, *, terms: WriterTerms = QUICK, retention_s: Callable[[], float] = lambda: 1e9
) -> AsyncIterator[Opened]:
    state_dir = StateDir.open(place.environ)
    async with (
        place.open() as database,
        open_ledger(database, state_dir, retention_s, terms=terms) as ledger,
    ):
        yield Opened(database, ledger)
