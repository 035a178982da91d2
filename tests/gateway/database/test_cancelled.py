"""A task that is cancelled in the middle of a transaction keeps nobody else waiting."""

from __future__ import annotations

import asyncio
from random import Random

from sqlalchemy import insert, update

from gateway.database.opening import open_database
from gateway.database.schema import meta
from gateway.settings_tenants import DatabaseSettings


async def test_no_lock_is_left_behind(tmp_path):
    environ = {"FOREBAY_STATE_DIR": str(tmp_path)}
    random = Random(7)
    async with open_database(DatabaseSettings(), environ) as database:
        async with database.begin() as connection:
            await connection.execute(insert(meta).values(key="count", value="0"))

        async def write() -> None:
            async with database.begin() as connection:
                statement = update(meta).where(meta.c.key == "count").values(value="1")
                (await connection.execute(statement.returning(meta.c.value))).all()

        for _ in range(120):
            task = asyncio.create_task(write())
            await asyncio.sleep(random.uniform(0, 0.004))
            task.cancel()
            await asyncio.wait([task])
            async with asyncio.timeout(2):
                await write()
