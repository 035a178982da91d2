"""A file as tenants see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

INPUT = "batch"
OUTPUT = "batch_output"
"""Purposes: what a batch reads, and what it has written."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Times are Unix seconds; `expires_s` None: it is kept until it is deleted."""

    id: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    created_s: float
    expires_s: float | None


class FilePage(NamedTuple):
    """Some of a tenant's files, and whether there are more behind them."""

    files: list[StoredFile]
    has_more: bool
