"""Progress of loading: a bar that leaves the log readable, or few log lines."""

from __future__ import annotations

import io
import sys

import pytest
from structlog.testing import capture_logs

from gateway.load_progress import LoggedProgress, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_every_ten_seconds() -> None:
    now = 0.0
    progress = LoggedProgress(clock=lambda: now)
    with capture_logs() as lines:
        for done in range(101):
            progress("weights", done, 100)
            now += 0.25
    assert [line["percent"] for line in lines] == [40, 80]
    assert {(line["event"], line["what"]) for line in lines} == {("loading", "weights")}


def test_fast_loading_says_nothing() -> None:
    with capture_logs() as lines:
        progress = LoggedProgress(clock=lambda: 5.0)
        progress("weights", 0, 0)
        progress("weights", 10, 10)
    assert lines == []


def test_what_is_written_meanwhile_has_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress() as progress:
        for done in (0, 5, 10):
            progress("weights", done, 10)
            sys.stderr.write(f"loaded {done}\n")
        progress("weights", 0, 0)
    written = terminal.getvalue().replace("\r", "\n").replace("\x1b[2K", "")
    assert "weights" in written
    assert [line for line in written.splitlines() if "loaded" in line] == [
        "loaded 0",
        "loaded 5",
        "loaded 10",
    ]
    assert sys.stderr is terminal
