"""What the operator's commands share: asking a running server, and showing what it answers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
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
_BESIDE_A_CELL = 3
"""Blanks that a table has for each of its columns."""
_FOLDED_TO = 24
"""Characters, in a table, of a last column that is too long to be on one line."""

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


@contextmanager
def understood(response: httpx.Response) -> Iterator[None]:
    """A scope that shows an answer. Where that is not made as ours are, such as that of another
    server or of another version, the scope ends with a CommandError that says so."""
    try:
        yield
    except UnicodeError:  # of what is written
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise CommandError(
            f"what answers at {response.url.copy_with(query=None)} is not forebay, or not of this "
            "version; --json shows its answer"
        ) from None


def console() -> Console:
    """A pipe has no width, and a file must not depend on this terminal's."""
    made = Console(highlight=False, markup=False)
    if not made.is_terminal:
        made.width = _WIDTH_WITHOUT_TERMINAL
    return made


def show_rows(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, figures: int = 0
) -> None:
    """A table of texts, the last `figures` columns of it numbers; what is None is left blank.

    A terminal that is too narrow for it gets a line for each cell instead, so that nothing is cut
    and no id is broken; a pipe always gets the table.
    """
    texts = [["" if cell is None else _on_one_line(str(cell)) for cell in row] for row in rows]
    if not texts:
        typer.echo("none")
        return
    made = console()
    least_width = _least_width(columns, texts, figures)
    if made.is_terminal and made.width < least_width:
        typer.echo("\n\n".join(_record(columns, row) for row in texts))
        return
    made.width = max(made.width, least_width)
    table = Table(box=SIMPLE_HEAD)
    first_figure = len(columns) - figures
    for number, column in enumerate(columns):
        table.add_column(
            column,
            overflow="fold",
            no_wrap=number < len(columns) - 1,
            justify="right" if number >= first_figure else "left",
        )
    for row in texts:
        table.add_row(*map(Text, row))
    made.print(table)


def _on_one_line(text: str) -> str:
    return printable(text).replace("\n", " ")


def _least_width(columns: Sequence[str], rows: list[list[str]], figures: int) -> int:
    """The characters that the table takes when only a last column of text is folded."""
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    if not figures:
        widths[-1] = min(widths[-1], max(_FOLDED_TO, cell_len(columns[-1])))
    return sum(widths) + _BESIDE_A_CELL * len(widths) + 1


def _record(columns: Sequence[str], row: Sequence[str]) -> str:
    """A row as lines of its own; what is blank is left out."""
    names = max(map(len, columns))
    return "\n".join(
        f"{column:<{names}}  {text}" for column, text in zip(columns, row, strict=True) if text
    )


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
