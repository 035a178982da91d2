"""Fixtures that any test may ask for, and what becomes of garbage while tests run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.postgres import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]


def pytest_collection_finish() -> None:
    """No collection looks again at all that was imported: that takes longer than many a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_is_left() -> Iterator[None]:
    """What a module left unclosed is told of at its last test, not wherever a collection happens
    to begin; and what outlives it is not looked at again."""
    yield
    gc.collect()
    gc.freeze()
