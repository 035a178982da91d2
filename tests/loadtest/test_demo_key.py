"""Where forebay's demo key is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.state_dir import StateDir
from loadtest.demo_key import existing_demo_key


@pytest.mark.parametrize("variable", ["FOREBAY_STATE_DIR", "XDG_STATE_HOME", "HOME"])
def test_it_is_found_where_forebay_keeps_it(tmp_path: Path, variable: str) -> None:
    environ = {variable: str(tmp_path)}
    assert existing_demo_key(environ) is None

    made = StateDir.open(environ).demo_key()

    assert existing_demo_key(environ) == made


@pytest.mark.parametrize("content", ["", "two\nlines", "sk-\xe9"])
def test_what_is_no_key_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "demo-key").write_text(content, encoding="latin-1")

    assert existing_demo_key({"FOREBAY_STATE_DIR": str(tmp_path)}) is None
