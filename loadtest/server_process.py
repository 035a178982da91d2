"""Servers of ours that stand in for others, each a module run in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loadtest.bench.campaign import CampaignError
from loadtest.wire.connection import Endpoint

_START_S = 20.0


@asynccontextmanager
async def running_module(module: str, name: str, *arguments: str) -> AsyncIterator[Endpoint]:
    """`python -m MODULE ARGUMENT...`, which prints its port on 127.0.0.1 when it listens; killed at
    the end of the scope. `name` is what it is called if it does not: then CampaignError is raised.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        if process.stdout is None:
            raise AssertionError("its standard output is a pipe")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _START_S)
        except TimeoutError:
            raise CampaignError(f"{name} did not listen within {_START_S:g} s") from None
        if not line.strip().isdigit():
            raise CampaignError(f"{name} did not start")
        yield Endpoint("127.0.0.1", int(line), "/v1")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
