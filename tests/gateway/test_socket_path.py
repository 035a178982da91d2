"""Sockets near directories of any depth, and only in places that are ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings_errors import ConfigError
from gateway.socket_path import LONGEST_BYTES, make_private, socket_path


def test_a_short_directory_holds_its_socket() -> None:
    assert socket_path(Path("/var/lib/x"), "s.sock", {}) == Path("/var/lib/x/s.sock")
    edge = Path("/" + "d" * (LONGEST_BYTES - len("//s.sock")))
    assert socket_path(edge, "s.sock", {}) == edge / "s.sock"
    assert len(str(edge / "s.sock")) == LONGEST_BYTES


def test_a_deep_one_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    deep, other = Path("/" + "d" * 200), Path("/" + "e" * 200)
    (tmp_path / ("r" * 100)).mkdir()
    path = socket_path(deep, "s.sock", {})
    assert path.parent.parent == Path("/tmp")
    assert path == socket_path(deep, "s.sock", {"XDG_RUNTIME_DIR": "relative"})
    assert path == socket_path(deep, "s.sock", {"XDG_RUNTIME_DIR": "/nowhere"})
    assert path == socket_path(deep, "s.sock", {"XDG_RUNTIME_DIR": str(tmp_path / ("r" * 100))})
    assert path != socket_path(other, "s.sock", {})
    assert socket_path(deep, "s.sock", {"XDG_RUNTIME_DIR": "/dev"}).parent.parent == Path("/dev")


def test_a_directory_is_private_or_refused(tmp_path: Path) -> None:
    make_private(tmp_path / "mine")
    make_private(tmp_path / "mine")  # as it is
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "file").touch(mode=0o600)
    for name in ("open", "link", "file"):
        with pytest.raises(ConfigError, match=name):
            make_private(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be made"):
        make_private(tmp_path / "nowhere" / "x")
