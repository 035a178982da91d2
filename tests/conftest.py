"""What all tests have in common."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: walking it in every collection would take as long as some of
    the tests."""
    gc.collect()
    gc.freeze()
