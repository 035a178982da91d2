"""Where the operator's key comes from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gateway.credentials import admin_key, admin_key_digest
from gateway.reload import ConfigSource
from gateway.state_dir import StateDir
from tests.gateway.stage import Stage


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"FOREBAY_STATE_DIR": str(tmp_path / "state")}


def test_without_a_file_a_key_is_made_once_for_its_owner_alone(environ: dict[str, str]) -> None:
    first = ConfigSource(None, environ, {}).load()
    state = StateDir.open(environ)
    key = state.existing_admin_key()
    assert key is not None
    assert key.startswith("sk-forebay-")
    assert first.admin_key_digest == hashlib.sha256(key.encode()).digest()
    assert (state.path / "admin-key").stat().st_mode & 0o777 == 0o600
    assert ConfigSource(None, environ, {}).load().admin_key_digest == first.admin_key_digest
    assert key != state.demo_key()


def test_the_variable_wins_and_then_none_is_made(environ: dict[str, str]) -> None:
    environ["FOREBAY_ADMIN_KEY"] = " of my own "
    loaded = ConfigSource(None, environ, {}).load()
    assert loaded.admin_key_digest == hashlib.sha256(b"of my own").digest()
    assert StateDir.open(environ).existing_admin_key() is None


def test_with_a_file_only_the_variable_counts(environ: dict[str, str]) -> None:
    settings = Stage().snapshot().settings
    StateDir.open(environ).admin_key()
    assert admin_key(settings, environ) is None
    assert admin_key_digest(settings, environ) is None
