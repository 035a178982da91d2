"""The Makefile: which Python it takes, and what it does in a virtual environment without pip."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.stack import ROOT

# Stands for an interpreter: writes down how it was called, has pip once something has given it one,
# and makes virtual environments of its own kind.
PYTHON = """#!/bin/sh
echo "$0 $*" >> {log}
case "$*" in
    *"-m pip --version"*) [ -e {log}.pip ] ;;
    *"-m ensurepip"*) {ensurepip} && touch {log}.pip ;;
    *"--python"*"install pip") touch {log}.pip ;;
    *"-m pip"*) [ -e {log}.pip ] || {{ echo "No module named pip"; exit 1; }} ;;
    *"-m venv "*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
    *version_info*) {new_enough} ;;
esac
"""


def interpreter(file: Path, *, ensurepip: bool = True, new_enough: bool = True) -> Path:
    """Put one there."""
    words = {True: "true", False: "false"}
    file.parent.mkdir(parents=True, exist_ok=True)
    log = file.parent / "calls"
    file.write_text(
        PYTHON.format(log=log, ensurepip=words[ensurepip], new_enough=words[new_enough])
    )
    file.chmod(0o755)
    return file


def make(venv: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Have everything that is needed to serve installed into `venv`."""
    search = os.environ["PATH"] if path is None else f"{path}:{os.environ['PATH']}"
    return subprocess.run(
        ["make", f"{venv}/.installed", f"VENV={venv}", *arguments],
        cwd=ROOT,
        env={"PATH": search},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("ensurepip", [True, False], ids=["ensurepip", "none of its own"])
def test_a_virtual_environment_without_pip_gets_one(tmp_path: Path, *, ensurepip: bool) -> None:
    """As `uv venv` makes one, or a `python -m venv` that was killed."""
    inside = interpreter(tmp_path / "venv/bin/python", ensurepip=ensurepip)
    outside = interpreter(tmp_path / "python3")
    done = make(tmp_path / "venv", f"PYTHON={outside}")
    if not ensurepip:
        # what the other one's pip would have done
        assert f"--python {inside} install pip" in (tmp_path / "calls").read_text()
        (tmp_path / "venv/bin/calls.pip").touch()
        done = make(tmp_path / "venv", f"PYTHON={outside}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "venv/.installed").exists()
    assert "--editable .[embedded]" in (tmp_path / "venv/bin/calls").read_text()


def test_a_python_that_is_named_is_the_only_one_that_is_tried(tmp_path: Path) -> None:
    interpreter(tmp_path / "path/python3")
    old = interpreter(tmp_path / "old", new_enough=False)
    for named in (tmp_path / "nowhere", old):
        refused = make(tmp_path / "venv", f"PYTHON={named}", path=tmp_path / "path")
        assert refused.returncode == 2
        assert f"no Python 3.11 or newer among: {named};" in refused.stderr
    assert not (tmp_path / "venv").exists()
    done = make(tmp_path / "venv", path=tmp_path / "path")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "head", ["#!{bin}/python3", '#!/bin/sh\n\'\'\'exec\' "{bin}/python3" "$0" "$@"']
)
def test_a_virtual_environment_that_was_moved_is_told_of(tmp_path: Path, head: str) -> None:
    interpreter(tmp_path / "venv/bin/python")
    for where, returncode in ((tmp_path / "venv", 0), (tmp_path / "old place", 2)):
        script = tmp_path / "venv/bin/forebay"
        script.write_text(head.format(bin=where / "bin") + "\nimport sys\n")
        done = make(tmp_path / "venv")
        assert done.returncode == returncode, done.stderr
    assert f"was made as {tmp_path}/old place and does not work here: 'make clean'" in done.stderr
