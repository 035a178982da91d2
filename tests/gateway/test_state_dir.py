"""What forebay makes for itself is made once, whole, and for its owner only."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.settings_errors import ConfigError
from gateway.state_dir import StateDir, new_key


def test_where_it_is(tmp_path: Path) -> None:
    home = {"HOME": "/home/me"}
    assert StateDir.locate(home) == Path("/home/me/.local/state/forebay")
    assert StateDir.locate({**home, "XDG_STATE_HOME": "/x"}) == Path("/x/forebay")
    assert StateDir.locate({**home, "XDG_STATE_HOME": "rel"}) == StateDir.locate(home)
    both = {**home, "XDG_STATE_HOME": "/x", "FOREBAY_STATE_DIR": "/mine"}
    assert StateDir.locate(both) == Path("/mine")


def test_secrets_are_made_once_with_mode_0600(tmp_path: Path) -> None:
    state = StateDir.open({"FOREBAY_STATE_DIR": str(tmp_path / "a" / "b")})
    assert state.existing_demo_key() is None
    key, secret = state.demo_key(), state.server_secret()
    again = StateDir.open({"FOREBAY_STATE_DIR": str(tmp_path / "a" / "b")})
    assert (again.demo_key(), again.server_secret()) == (key, secret)
    assert again.existing_demo_key() == key
    assert key.startswith("sk-forebay-")
    assert len(secret) == 64
    files = sorted(state.path.iterdir())
    assert [file.name for file in files] == ["demo-key", "server-secret"]  # no drafts left
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700


def test_everybody_who_starts_at_once_gets_the_same_secret(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: state.server_secret(), range(32)))
    assert len(secrets) == 1


def test_an_empty_secret_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server-secret").touch()
    with pytest.raises(ConfigError, match="server-secret: is empty"):
        StateDir(tmp_path).server_secret()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^FOREBAY_STATE_DIR: .*/file/state cannot be made"):
        StateDir.open({"FOREBAY_STATE_DIR": str(tmp_path / "file" / "state")})


def test_keys_differ() -> None:
    assert len({new_key() for _ in range(100)}) == 100


def test_private_directories_are_for_their_owner_only(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    (tmp_path / "redis").mkdir(mode=0o755)
    for _ in range(2):
        assert state.private_directory("redis") == tmp_path / "redis"
        assert stat.S_IMODE((tmp_path / "redis").stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/redis: cannot be made"):
        StateDir(tmp_path / "file").private_directory("redis")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state"
    path.mkdir()
    (path / "server-secret").write_text("planted")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"others can write to .*chmod go-w {path}$"):
        StateDir.open({"FOREBAY_STATE_DIR": str(path)})
    path.chmod(mode & ~0o022)
    assert StateDir.open({"FOREBAY_STATE_DIR": str(path)}).path == path


def test_somebody_elses_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ConfigError, match=rf"{tmp_path} belongs to user {other - 1}, .* {other},"):
        StateDir.open({"FOREBAY_STATE_DIR": str(tmp_path)})


def test_a_damaged_secret_file_is_refused_and_a_damaged_key_is_none(tmp_path: Path) -> None:
    for name in ("server-secret", "admin-key", "demo-key"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    state = StateDir(tmp_path)
    with pytest.raises(ConfigError, match="server-secret: is damaged"):
        state.server_secret()
    assert state.existing_admin_key() is None
    assert state.existing_demo_key() is None


def test_a_home_directory_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="FOREBAY_STATE_DIR: is in a home directory"):
        StateDir.locate({"FOREBAY_STATE_DIR": "~nobody-of-this-name/state"})
