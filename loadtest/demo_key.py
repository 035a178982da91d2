"""The key that forebay makes for itself where nobody has configured tenants, so that a server of
this machine can be measured as it was started."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from loadtest.wire.connection import checked_key

_FILE = "demo-key"


def existing_demo_key(environ: Mapping[str, str]) -> str | None:
    """The demo tenant's key if this machine's forebay has made one that can be read: in
    FOREBAY_STATE_DIR, else XDG_STATE_HOME/forebay, else ~/.local/state/forebay."""
    try:
        key = (_state_dir(environ) / _FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError, RuntimeError):  # the last one: nobody knows a home
        return None
    with suppress(ValueError):
        return checked_key(key) or None
    return None


def _state_dir(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("FOREBAY_STATE_DIR"):
        return Path(chosen).expanduser()
    # The XDG specification says that a relative path there is to be ignored.
    if (base := environ.get("XDG_STATE_HOME", "")) and Path(base).is_absolute():
        return Path(base) / "forebay"
    return Path(environ.get("HOME") or Path.home()) / ".local" / "state" / "forebay"
