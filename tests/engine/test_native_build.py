"""Building the kernels: found, cached, or refused with a reason."""

from __future__ import annotations

import pytest
import torch

from engine.executors.native import NativeUnavailable
from engine.executors.native_build import build_library, cache_directory, find_compiler
from tests.engine.native_models import architecture, open_native


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch):
    """Whatever whoever runs the tests has set."""
    monkeypatch.delenv("FOREBAY_NATIVE", raising=False)


def refuse_to_speak(message: str) -> None:
    raise AssertionError(f"nothing was to be compiled: {message}")


def test_switched_off(monkeypatch):
    monkeypatch.setenv("FOREBAY_NATIVE", "off")
    with pytest.raises(NativeUnavailable, match="FOREBAY_NATIVE=off"):
        open_native(architecture())


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        find_compiler()
    monkeypatch.setenv("CXX", "missing-compiler")
    with pytest.raises(NativeUnavailable, match="CXX=missing-compiler"):
        find_compiler()


def test_failing_compiler_leaves_nothing(monkeypatch, tmp_path):
    compiler = tmp_path / "broken++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: no" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    said: list[str] = []
    with pytest.raises(NativeUnavailable, match="error: no"):
        build_library(said.append)
    assert "compiling" in said[0]
    assert not list((tmp_path / "cache").iterdir())


def test_unwritable_cache(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(blocked / "cache"))
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(NativeUnavailable, match="FOREBAY_CACHE_DIR"):
        build_library(lambda message: None)


def test_compiled_once(monkeypatch, tmp_path):
    copier = tmp_path / "fake++"
    copier.write_text('#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] || echo x >"$last"\n')
    copier.chmod(0o755)
    monkeypatch.setenv("CXX", str(copier))
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    said: list[str] = []
    library = build_library(said.append)
    assert library.read_text() == "x\n"
    assert [line.split()[0] for line in said] == ["compiling", "compiled"]
    assert build_library(refuse_to_speak) == library
    assert list((tmp_path / "cache").iterdir()) == [library]


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("FOREBAY_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "forebay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "forebay"


def test_unknown_instruction_set(monkeypatch):
    try:
        find_compiler()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("FOREBAY_NATIVE_ISA", "mmx")
    with pytest.raises(NativeUnavailable, match="FOREBAY_NATIVE_ISA=mmx"):
        open_native(architecture(), torch.bfloat16)
