"""`forebay ledger`: the rows of a running server's ledger."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import httpx
import typer

from gateway.cli.errors import CommandError
from gateway.cli.operator_call import KEY_HINT, Key, Url, own_key
from gateway.cli.server_call import DEFAULT_URL, connected, refusal
from gateway.cli.usage import End, OneTenant, Start, asked_for

ledger = typer.Typer(help="Read a running server's ledger: one row for every request.")

_READ_TIMEOUT_S = 60.0


class Form(StrEnum):
    """What the server writes rows as."""

    CSV = "csv"
    JSONL = "jsonl"


@ledger.callback()
def _ledger() -> None:
    """Read a running server's ledger: one row for every request."""


@ledger.command("export")
def export(
    form: Annotated[Form, typer.Option("--format", help="How rows are written.")] = Form.CSV,
    tenant: OneTenant = None,
    start: Start = None,
    end: End = None,
    output: Annotated[
        Path | None, typer.Option(help="A file, which is there once it is whole; else printed.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Write every row of a time, of one tenant or of all."""
    params = asked_for(format=form, tenant=tenant, start=start, end=end)
    with (
        connected(url, key or own_key(), read_timeout_s=_READ_TIMEOUT_S) as client,
        client.stream("GET", "/admin/ledger", params=params) as response,
    ):
        if response.status_code != httpx.codes.OK:
            response.read()
            raise CommandError(refusal(response, key_hint=KEY_HINT))
        with _written_whole(output) as file:
            for chunk in response.iter_bytes():
                file.write(chunk)


@contextmanager
def _written_whole(path: Path | None) -> Iterator[BinaryIO]:
    """The file, which comes to be under its name at the end of a scope that did not fail; standard
    output for None. What is there and is no file, such as a pipe, is written to as it is."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if path.exists() and not path.is_file():
        try:
            with path.open("wb") as there:
                yield there
        except OSError as error:
            raise _unwritable(path, error) from None
        return
    path = Path(os.path.realpath(path))  # a link stays one, unless it leads in a circle
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("xb") as file:
            yield file
        draft.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> Exception:
    """What to raise: who has left a pipe wants to hear nothing of it."""
    if isinstance(error, BrokenPipeError):
        return error
    return CommandError(f"{path}: cannot be written ({error.strerror})")
