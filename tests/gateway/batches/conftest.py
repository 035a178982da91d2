"""A database of either kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.database.opening import Database
from tests.gateway.database.both import KINDS, place


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """On both."""
    async with place(request.param, tmp_path, request).open() as opened:
        yield opened


@pytest.fixture
async def sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """For what does not depend on the database."""
    async with place("sqlite", tmp_path, request).open() as opened:
        yield opened
