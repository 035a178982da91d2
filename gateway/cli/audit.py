"""`forebay audit`: what operators did."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from gateway.cli.operator_call import (
    AsJson,
    Key,
    Url,
    answered,
    ask,
    show_rows,
    shown_time,
    understood,
)
from gateway.cli.server_call import DEFAULT_URL

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def audit(
    action: Annotated[
        str | None, typer.Option(help="Only this, such as key.revoke, or key for all of those.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Only what was done to this.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="A date (UTC), or such as 2026-01-31T12:00:00Z."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before this.")] = None,
    before: Annotated[int | None, typer.Option(help="Before the entry of this number.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 50,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show what operators did with a running server, the latest first."""
    given = {
        "action": action,
        "target": target,
        "since": _moment(since),
        "until": _moment(until),
        "before": before,
        "limit": limit,
    }
    params = {name: str(value) for name, value in given.items() if value is not None}
    response = ask("GET", "/admin/audit", url, key, params=params)
    if as_json:
        typer.echo(response.text)
        return
    answer = answered(response, "entries")
    with understood(response):
        show_rows(
            ("number", "when", "who", "from", "action", "target", "outcome", "detail"),
            (
                (
                    entry["id"],
                    shown_time(entry["at"]),
                    entry["actor"],
                    entry["client"],
                    entry["action"],
                    entry["target"],
                    entry["outcome"],
                    json.dumps(entry["detail"]) if entry["detail"] else "",
                )
                for entry in answer["entries"]
            ),
        )
        if answer["next"] is not None:
            typer.echo(f"there are earlier ones: --before {answer['next']}")


def _moment(given: str | None) -> str | None:
    """A date as its first moment; the rest as it is."""
    is_date = given is not None and _DATE.fullmatch(given)
    return f"{given}T00:00:00Z" if is_date else given
