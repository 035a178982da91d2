"""Fixtures that any test may ask for."""

from __future__ import annotations

from tests.postgres import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]
