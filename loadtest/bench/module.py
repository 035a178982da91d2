"""Benches of the rooms themselves, each a module with `--json`, run in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import orjson

from loadtest.bench.campaign import CampaignError

_LIMIT_S = 120.0


async def json_of_module(module: str, arguments: Sequence[str] = ()) -> Any:
    """What `python -m MODULE --json ARGUMENT...` prints. Raises CampaignError if it fails or takes
    too long."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--json", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            output, said = await process.communicate()
    except TimeoutError:
        raise CampaignError(f"{module}: no end within {_LIMIT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = said.decode("utf-8", "replace").split("\n")
        why = next((line for line in reversed(lines) if line.strip()), "no reason given")
        raise CampaignError(f"{module}: {why}")
    return orjson.loads(output)
