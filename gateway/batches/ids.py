"""Names of files and batches. They begin with the time they were made at, so that their order is
that of time, and the place behind one that has been deleted can still be told."""

from __future__ import annotations

import re
import secrets
from typing import Literal

Kind = Literal["file-", "batch_"]

_REST = re.compile(r"[0-9a-f]{32}")


def new_id(kind: Kind, now_s: float) -> str:
    """One that nobody has; `now_s` is a Unix time."""
    return first_id(kind, now_s) + secrets.token_hex(10)


def first_id(kind: Kind, at_s: float) -> str:
    """What no name that was made at this time or later comes before."""
    return f"{kind}{max(0, int(at_s * 1e3)):012x}"


def is_id(kind: Kind, name: str) -> bool:
    """Whether this could be such a name."""
    return name.startswith(kind) and _REST.fullmatch(name, len(kind)) is not None
