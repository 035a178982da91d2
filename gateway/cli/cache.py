"""`forebay cache`: what a running server's cache holds, why a request missed it, and removal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gateway.cli import exit_codes
from gateway.cli.errors import CommandError
from gateway.cli.operator_call import (
    KEY_HINT,
    AsJson,
    Key,
    Url,
    answered,
    console,
    raw,
    understood,
)
from gateway.cli.server_call import DEFAULT_URL, printable, refusal
from gateway.explain import text_lines
from gateway.settings_tenants import TENANT_ID, TENANT_ID_RULE

cache = typer.Typer(help="Look into a running server's prompt cache, and remove from it.")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

_TIERS = ("device", "dram", "redis")
_NOT_COUNTED = "-"
_OWNERS = {"shared": "(shared prefixes)", "other": "(not configured)"}


@cache.command("stats")
def stats(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Say what each tier of each model holds, and whose it is."""
    response = _call("GET", "/admin/cache", url, key)
    if as_json:
        typer.echo(response.text)
        return
    shown = console()
    answer = answered(response, "models")
    with understood(response):
        for name, model in answer["models"].items():
            for replica in model["replicas"]:
                shown.print(_tiers_table(f"{name} ({replica['replica']})", replica["tiers"]))
                if replica["owners"]:
                    shown.print(_owners_table(replica["owners"]))
        for name in answer.get("not_covered", ()):
            typer.echo(
                printable(f"{name}: runs on servers elsewhere; ask there what they have cached")
            )


@cache.command("explain")
def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The answer's x-request-id.")
    ],
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say where each part of a request's prompt came from. What was in no tier comes with the
    reason for which it was computed."""
    response = _call("GET", f"/admin/requests/{quote(request_id, safe='')}/cache", url, key)
    if as_json:
        typer.echo(response.text)
        return
    with understood(response):
        for number, request in enumerate(answered(response, "requests")["requests"]):
            if number:
                typer.echo()
            for line in text_lines(request):
                typer.echo(printable(line))


@cache.command("flush")
def flush(
    model: Annotated[str | None, typer.Option(help="Only this model's; else all.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Remove every block from every tier of the server's own. Nothing is lost but the time to
    compute it again."""
    params = {} if model is None else {"model": model}
    _show_removal(_call("POST", "/admin/cache/flush", url, key, params), as_json=as_json)


@cache.command("erase")
def erase(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id.")],
    user: Annotated[
        str | None, typer.Option(help="Only this user's; needs cache.scope user.")
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="The tenant is no longer in the configuration.")
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Remove a tenant's KV and named prefixes from every tier here."""
    if not TENANT_ID.fullmatch(tenant):
        raise CommandError(f"TENANT: {TENANT_ID_RULE}", exit_code=exit_codes.USAGE)
    params = {} if user is None else {"user": user}
    if unknown:
        params["unknown"] = "allow"
    path = f"/admin/tenants/{tenant}/cache"
    _show_removal(_call("DELETE", path, url, key, params), as_json=as_json)


def _call(
    method: str, path: str, url: str, key: str | None, params: Mapping[str, str] | None = None
) -> httpx.Response:
    """The server's answer: 200, or a removal that was not complete. Raises CommandError."""
    response = raw(method, path, url, key, params=params)
    status = response.status_code
    partly_done = status == httpx.codes.SERVICE_UNAVAILABLE and '"models":' in response.text
    if status != httpx.codes.OK and not partly_done:
        raise CommandError(refusal(response, key_hint=KEY_HINT))
    return response


def _show_removal(response: httpx.Response, *, as_json: bool) -> None:
    answer = answered(response, "models")
    if as_json:
        typer.echo(response.text)
    else:
        with understood(response):
            for line in _removal_lines(answer):
                typer.echo(printable(line))
    if not answer.get("complete"):
        raise CommandError(refusal(response, key_hint=KEY_HINT))


def _removal_lines(answer: dict[str, Any]) -> Iterator[str]:
    for name, tiers in answer["models"].items():
        counts = [
            f"{tier} {'not reached' if blocks is None else f'{blocks:,}'}"
            for tier, blocks in tiers.items()
        ]
        yield f"{name}: blocks removed: {', '.join(counts)}"
    if answer.get("named_prefixes"):
        yield f"named prefixes removed: {answer['named_prefixes']}"
    for name in answer.get("not_covered", ()):
        yield f"{name}: not covered: it runs on servers that were not asked"


def _tiers_table(title: str, tiers: list[dict[str, Any]]) -> Table:
    """One column per tier, so that it fits into any terminal."""
    names = [tier["tier"] if tier["up"] else f"{tier['tier']} (down)" for tier in tiers]
    table = _table(title, names)
    for state in ("free", "cached", "held", "total"):
        blocks = (tier["blocks"] for tier in tiers)
        counts = (f"{each[state]:,}" if each["total"] else _NOT_COUNTED for each in blocks)
        table.add_row(f"blocks {state}", *counts)
    table.add_row("bytes", *(_bytes(tier["used_bytes"]) for tier in tiers))
    sizes = (tier["total_bytes"] for tier in tiers)
    table.add_row("of", *(_bytes(size) if size else _NOT_COUNTED for size in sizes))
    _add(table, "hits", [tier["hits"] for tier in tiers])
    _add_by_reason(table, "misses", [tier["misses"] for tier in tiers])
    _add(table, "loads", [tier["loads"] for tier in tiers])
    table.add_row("load seconds", *(f"{tier['load_s']:,.2f}" for tier in tiers))
    table.add_row("saved seconds", *(f"{tier['saved_s']:,.2f}" for tier in tiers))
    _add(table, "stores", [tier["stores"] for tier in tiers])
    _add_by_reason(table, "not stored", [tier["dropped"] for tier in tiers])
    _add(table, "evictions", [tier["evictions"] for tier in tiers])
    return table


def _owners_table(owners: list[dict[str, Any]]) -> Table:
    table = _table("blocks by tenant", list(_TIERS))
    for owner in owners:
        name = _OWNERS.get(owner["owner"]) or str(owner["tenant"])
        _add(table, name, [owner[tier] for tier in _TIERS])
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=Text(printable(title)), title_justify="left", box=SIMPLE_HEAD)
    table.add_column()
    for column in columns:
        table.add_column(Text(printable(column)), justify="right")
    return table


def _add(table: Table, name: str, counts: list[int]) -> None:
    table.add_row(Text(printable(name)), *(f"{count:,}" for count in counts))


def _add_by_reason(table: Table, name: str, counts: list[dict[str, int]]) -> None:
    """The sum, and below it what it is made of."""
    _add(table, name, [sum(by_reason.values()) for by_reason in counts])
    for reason in sorted({reason for by_reason in counts for reason in by_reason}):
        _add(table, f"  {reason}", [by_reason.get(reason, 0) for by_reason in counts])


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"
