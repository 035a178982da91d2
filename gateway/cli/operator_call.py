"""What the operator's commands share: asking a running server, and showing what it answers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.cli import exit_codes
from gateway.cli.errors import CommandError
from gateway.cli.server_call import connected, printable, refusal
from gateway.state_dir import StateDir

KEY_HINT = "see --key and FOREBAY_ADMIN_KEY; it must be the key that the server was started with"
READ_TIMEOUT_S = 180.0
"""A removal may take the server two minutes."""
_WIDTH_WITHOUT_TERMINAL = 200

Url = Annotated[str, typer.Option(help="The server's address.")]
Key = Annotated[
    str | None,
    typer.Option(envvar="FOREBAY_ADMIN_KEY", help="Operator's key; else this machine's own."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as it is.")]


def ask(
    method: str,
    path: str,
    url: str,
    key: str | None,
    *,
    params: Mapping[str, str] | None = None,
    body: object = None,
) -> httpx.Response:
    """The server's answer, if it is a success; `body` is sent as JSON. Raises CommandError."""
    response = raw(method, path, url, key, params=params, body=body)
    if not response.is_success:
        raise CommandError(refusal(response, key_hint=KEY_HINT))
    return response


def raw(
    method: str,
    path: str,
    url: str,
    key: str | None,
    *,
    params: Mapping[str, str] | None = None,
    body: object = None,
) -> httpx.Response:
    """The server's answer, whatever it is. Raises CommandError if there is none."""
    with connected(url, key or own_key(), read_timeout_s=READ_TIMEOUT_S) as client:
        return client.request(method, path, params=params, json=body)


def answered(response: httpx.Response, member: str) -> Any:
    """The answer's JSON object, which must have this member."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or member not in answer:
        raise CommandError(f"what answers at {response.url.copy_with(query=None)} is not forebay")
    return answer


def console() -> Console:
    """A pipe has no width, and a file must not depend on this terminal's."""
    made = Console(highlight=False, markup=False)
    if not made.is_terminal:
        made.width = _WIDTH_WITHOUT_TERMINAL
    return made


def show_rows(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table of texts; what is None is left blank."""
    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else printable(str(cell))) for cell in row))
    console().print(table)


def shown_time(moment_s: float | None) -> str:
    """Unix seconds as people read them; blank for None."""
    if moment_s is None:
        return ""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def own_key() -> str:
    """The operator's key that was made in the state directory. Raises CommandError if none was."""
    key = StateDir(StateDir.locate(os.environ)).existing_admin_key()
    if key is None:
        raise CommandError(
            "no operator's key: give --key or set FOREBAY_ADMIN_KEY", exit_code=exit_codes.USAGE
        )
    return key
