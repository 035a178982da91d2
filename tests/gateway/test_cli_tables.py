"""Tables of the command line: whole in any terminal; and help that says what a command does."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from rich.console import Console

from gateway.cli import operator_call, tenants
from gateway.cli.main import run
from gateway.cli.operator_call import show_rows

COLUMNS = ("key id", "tenant", "detail")
ROWS = [("key-0123456789abcdef", "search", "a long story, told in many words"), ("k", None, "\x1b")]


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, figures: int
) -> list[str]:
    terminal = Console(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(operator_call, "console", lambda: terminal)
    show_rows(COLUMNS, ROWS, figures=figures)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_wide_terminal_gets_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(monkeypatch, capsys, 80, 0)
    assert "  key-0123456789abcdef   search   a long story, told in many words" in lines


def test_only_the_last_column_is_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(monkeypatch, capsys, 60, 0)
    assert "  key-0123456789abcdef   search   a long story, told in" in lines
    assert "many words" in [line.strip() for line in lines]


@pytest.mark.parametrize(("width", "figures"), [(59, 0), (67, 1)])
def test_a_narrow_terminal_gets_a_line_for_each_cell(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    width: int,
    figures: int,
) -> None:
    assert shown(monkeypatch, capsys, width, figures) == [
        "key id  key-0123456789abcdef",
        "tenant  search",
        "detail  a long story, told in many words",
        "",
        "key id  k",
    ]


def test_figures_are_never_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(monkeypatch, capsys, 68, 1)
    assert "  key-0123456789abcdef   search   a long story, told in many words" in lines


def test_a_pipe_gets_a_table_however_wide(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(COLUMNS, [("k" * 150, "t" * 150, "d")])
    assert f"  {'k' * 150}   {'t' * 150}   d" in map(
        str.rstrip, capsys.readouterr().out.split("\n")
    )


def test_no_rows_are_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(COLUMNS, [])
    assert capsys.readouterr().out == "none\n"


@pytest.mark.parametrize("group", [[], ["keys"], ["tenants"], ["ledger"], ["cache"]])
def test_lists_of_commands_cut_no_sentence_short(
    group: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*group, "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert listed
    assert "..." not in listed


def test_a_command_does_not_wait_for_what_it_does_not_use() -> None:
    """sqlalchemy alone takes longer to import than a command takes to be answered."""
    code = "import sys, gateway.cli; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_tenants_row_has_every_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown_tenant = {
        "id": "acme",
        "source": "file",
        "keys": 1,
        "class": "standard",
        "weight": 1.0,
        "models": ["*"],
        "problem": None,
        "limits": {
            "rpm": 600,
            "tpm": None,
            "concurrency": None,
            "budget_usd": {"amount": 5, "per": "day"},
            "cached_weight": 0.1,
            "enqueued_tokens": 20000,
            "models": {"big": {"rpm": 10, "budget_usd": {"amount": 1, "per": "month"}}},
        },
    }
    answer = httpx.Response(200, json={"tenants": [shown_tenant]})
    monkeypatch.setattr(tenants, "ask", lambda *_: answer)
    terminal = Console(width=200, force_terminal=True, color_system=None)
    monkeypatch.setattr(operator_call, "console", lambda: terminal)
    tenants.list_command()
    limits = "rpm 600, 5 USD per day, enqueued_tokens 20,000, big: rpm 10, big: 1 USD per month"
    assert limits in capsys.readouterr().out
