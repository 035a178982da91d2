"""`forebay keys`: keys for a configuration file, and those of a running server.

`create` and `hash` need no server: what they print goes into the file. `issue` has a running server
make a key, which is valid at once and needs no file: another word, because the one prints a hash to
be pasted and the other changes who may come in. No command takes a plain key as an argument.
"""

from __future__ import annotations

import getpass
import sys
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from gateway.cli import exit_codes
from gateway.cli.errors import CommandError
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
from gateway.cli.server_call import DEFAULT_URL, printable
from gateway.cli.settings_given import Settings, given_settings
from gateway.settings_tenants import TENANT_ID, TENANT_ID_RULE
from gateway.state_dir import new_key
from gateway.tenants import hash_key

keys = typer.Typer(
    help="Make, list, rotate and revoke API keys. `create` and `hash` are for a configuration file "
    "and need no server; the others are about the keys of a running one."
)

KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="The key's id, not the key itself.")]
Lifetime = Annotated[
    str | None,
    typer.Option("--expires-in", metavar="DURATION", help="Such as 30d; else it does not expire."),
]


@keys.command("create")
def create(
    tenant: Annotated[
        str | None, typer.Option(help="Also print the tenant's entry for the configuration.")
    ] = None,
) -> None:
    """Make a key for a configuration file. It is shown once; only its hash goes into the file."""
    if tenant is not None and not TENANT_ID.fullmatch(tenant):
        raise CommandError(f"--tenant: {TENANT_ID_RULE}", exit_code=exit_codes.USAGE)
    key = new_key()
    typer.echo(f"key:  {key}")
    typer.echo(f"hash: {hash_key(key)}")
    if tenant is not None:
        typer.echo(f'\ntenants:\n  - id: {tenant}\n    keys: [{{hash: "{hash_key(key)}"}}]')


@keys.command("hash")
def hash_command() -> None:
    """Hash a key read from standard input, or asked for on a terminal."""
    typed = getpass.getpass("Key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = typed.strip()
    if not key:
        raise CommandError(
            "no key: pipe it in or type it at the prompt", exit_code=exit_codes.USAGE
        )
    typer.echo(hash_key(key))


@keys.command("issue")
def issue(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id.")],
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    lifetime: Lifetime = None,
    settings: Settings = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Have a running server make a key, valid at once and shown once. The tenant may be of its
    configuration file or not. `--set limits.rpm=60` gives the key limits of its own."""
    body: dict[str, Any] = {**given_settings(None, settings), "tenant": tenant, "name": name}
    if lifetime is not None:
        body["expires_in"] = lifetime
    _show_new(ask("POST", "/admin/keys", url, key, body=body), as_json=as_json)


@keys.command("list")
def list_command(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Every key of a running server, without the keys themselves."""
    params = {} if tenant is None else {"tenant": tenant}
    response = ask("GET", "/admin/keys", url, key, params=params)
    if as_json:
        typer.echo(response.text)
        return
    columns = ("key id", "tenant", "name", "from", "state", "made", "expires", "replaced by")
    with understood(response):
        show_rows(
            columns,
            (
                (
                    each["id"],
                    each["tenant"],
                    each["name"],
                    each["source"],
                    each["problem"] or each["state"],
                    shown_time(each["created_at"]),
                    shown_time(each["expires_at"]),
                    each["replaced_by"],
                )
                for each in answered(response, "keys")["keys"]
            ),
        )


@keys.command("rotate")
def rotate(
    key_id: KeyId,
    grace: Annotated[
        str, typer.Option(metavar="DURATION", help="How long the old key stays valid.")
    ] = "24h",
    lifetime: Annotated[
        str | None,
        typer.Option(
            "--expires-in", metavar="DURATION", help="Such as 30d; else as long as the old one's."
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a key in place of another, with its name and limits. It is shown once."""
    body = {"grace_s": grace}
    if lifetime is not None:
        body["expires_in"] = lifetime
    _show_new(ask("POST", f"{_path(key_id)}/rotate", url, key, body=body), as_json=as_json)


@keys.command("expire")
def expire(
    key_id: KeyId,
    after: Annotated[
        str | None, typer.Option("--in", metavar="DURATION", help="From now, such as 7d.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Such as 2026-12-31T00:00:00Z.")
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="Not at all.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say when a key ends."""
    if [after is not None, at is not None, never].count(True) != 1:
        raise CommandError("give one of --in, --at and --never", exit_code=exit_codes.USAGE)
    body = {"expires_at": at} if after is None else {"expires_in": after}
    _show(ask("PATCH", _path(key_id), url, key, body=body), as_json=as_json)


@keys.command("revoke")
def revoke(key_id: KeyId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Let nobody in with a key any more, for good. Every server refuses it within two seconds."""
    _show(ask("DELETE", _path(key_id), url, key), as_json=as_json)


def _path(key_id: str) -> str:
    return f"/admin/keys/{quote(key_id, safe='')}"


def _show_new(response: httpx.Response, *, as_json: bool) -> None:
    made = answered(response, "key")
    if as_json:
        _show(response, as_json=True)
        return
    with understood(response):
        typer.echo(f"key:     {printable(made['key'])}")
    _show(response, as_json=False)
    if "replaces" in made:
        typer.echo(f"instead of {printable(made['replaces'])}, which ends after its grace period")
    typer.echo("The key is not shown again.")


def _show(response: httpx.Response, *, as_json: bool) -> None:
    shown = answered(response, "state")
    if as_json:
        typer.echo(response.text)
        return
    with understood(response):
        typer.echo(printable(f"id:      {shown['id']}"))
        typer.echo(printable(f"tenant:  {shown['tenant']}"))
        if shown["name"]:
            typer.echo(printable(f"name:    {shown['name']}"))
        typer.echo(printable(f"state:   {shown['state']}"))
        typer.echo(f"expires: {shown_time(shown['expires_at']) or 'never'}")
