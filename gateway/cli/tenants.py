"""`forebay tenants`: the tenants of a running server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from gateway.cli import exit_codes
from gateway.cli.errors import CommandError
from gateway.cli.operator_call import (
    KEY_HINT,
    AsJson,
    Key,
    Url,
    answered,
    ask,
    raw,
    show_rows,
    shown_time,
    understood,
)
from gateway.cli.server_call import DEFAULT_URL, printable, refusal
from gateway.cli.settings_given import File, Settings, given_settings

tenants = typer.Typer(
    help="Show, make, change and delete tenants of a running server. Those of its configuration "
    "file (without one, of forebay's own configuration) are shown here, and changed there."
)

TenantId = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id.")]


@tenants.command("list")
def list_command(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Every tenant, and what limits it."""
    response = ask("GET", "/admin/tenants", url, key)
    if as_json:
        typer.echo(response.text)
        return
    columns = ("tenant", "from", "keys", "class", "weight", "limits", "models", "problem")
    with understood(response):
        show_rows(
            columns,
            (
                (
                    tenant["id"],
                    tenant["source"],
                    tenant["keys"],
                    tenant["class"],
                    _written(tenant["weight"]),
                    ", ".join(_limits(tenant["limits"])),
                    ", ".join(tenant["models"]),
                    tenant["problem"],
                )
                for tenant in answered(response, "tenants")["tenants"]
            ),
        )


@tenants.command("show")
def show(
    tenant: TenantId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False
) -> None:
    """One tenant with all of its settings."""
    _show(ask("GET", _path(tenant), url, key), as_json=as_json)


@tenants.command("create")
def create(
    tenant: TenantId,
    settings: Settings = None,
    file: File = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a tenant. It has no keys yet: `forebay keys issue TENANT` makes one."""
    body = {**given_settings(file, settings), "id": tenant}
    _show(ask("POST", "/admin/tenants", url, key, body=body), as_json=as_json)


@tenants.command("update")
def update(
    tenant: TenantId,
    settings: Settings = None,
    file: File = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Change settings; what is not named stays. `--set limits.rpm=null` takes one back."""
    body = given_settings(file, settings)
    _show(ask("PATCH", _path(tenant), url, key, body=body), as_json=as_json)


@tenants.command("delete")
def delete(
    tenant: TenantId,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Erase what is left of one that was deleted.")
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a tenant's keys; erase its files, batches and cache. What it used stays in the
    ledger."""
    if not yes and not _agreed(f"Delete {tenant}, its keys, files, batches and cache?"):
        raise CommandError("nothing was deleted")
    params = {"unknown": "allow"} if unknown else {}
    response = raw("DELETE", _path(tenant), url, key, params=params)
    partly_done = response.status_code == httpx.codes.SERVICE_UNAVAILABLE
    if not response.is_success and not (partly_done and '"keys_revoked":' in response.text):
        raise CommandError(refusal(response, key_hint=KEY_HINT))
    answer = answered(response, "keys_revoked")
    if as_json:
        typer.echo(response.text)
    else:
        with understood(response):
            _show_removal(answer)
    if partly_done:
        raise CommandError(refusal(response, key_hint=KEY_HINT))


def _show_removal(answer: dict[str, Any]) -> None:
    for what in ("keys_revoked", "files", "batches", "named_prefixes"):
        typer.echo(f"{what.replace('_', ' ')}: {answer[what]}")
    for name, tiers in answer["models"].items():
        counts = ", ".join(f"{tier} {blocks}" for tier, blocks in tiers.items())
        typer.echo(printable(f"{name}: blocks removed: {counts}"))
    for name in answer["not_covered"]:
        typer.echo(printable(f"{name}: not covered: it runs on servers that were not asked"))


def _agreed(question: str) -> bool:
    """What somebody answers. Raises CommandError if nobody can, typer.Abort at Ctrl-C."""
    try:
        return typer.confirm(question)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        typer.echo()
        raise CommandError(
            "nobody is here to be asked: --yes does without", exit_code=exit_codes.USAGE
        ) from None


def _path(tenant: str) -> str:
    return f"/admin/tenants/{quote(tenant, safe='')}"


def _show(response: httpx.Response, *, as_json: bool) -> None:
    tenant = answered(response, "source")
    if as_json:
        typer.echo(response.text)
        return
    with understood(response):
        for name in ("created_at", "updated_at"):
            tenant[name] = shown_time(tenant[name]) or None
        for name, value in _flat(tenant):
            typer.echo(printable(f"{name}: {value}"))


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`limits.rpm` and its value; what is not set is left out."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield prefix + name, ", ".join(map(str, value))
        elif value is not None:
            yield prefix + name, _written(value)


def _written(value: object) -> str:
    """A setting as the configuration file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _limits(limits: dict[str, Any]) -> Iterator[str]:
    yield from _ceilings(limits)
    if limits["enqueued_tokens"] is not None:
        yield f"enqueued_tokens {limits['enqueued_tokens']:,}"
    for model, own in limits["models"].items():
        yield from (f"{model}: {ceiling}" for ceiling in _ceilings(own))


def _ceilings(limits: dict[str, Any]) -> Iterator[str]:
    """Of a tenant, or of a model within one, which may leave some out."""
    for name in ("rpm", "tpm", "concurrency"):
        if limits.get(name) is not None:
            yield f"{name} {limits[name]:,}"
    if (budget := limits.get("budget_usd")) is not None:
        yield f"{budget['amount']} USD per {budget['per']}"
