"""`forebay keys`: making keys and hashing them. A plain key never appears on a command line."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from gateway.cli import exit_codes
from gateway.cli.errors import CommandError
from gateway.settings_tenants import TENANT_ID, TENANT_ID_RULE
from gateway.state_dir import new_key
from gateway.tenants import hash_key

keys = typer.Typer(help="Make API keys and hash them.")


@keys.command("create")
def create(
    tenant: Annotated[
        str | None, typer.Option(help="Also print the tenant's entry for the configuration.")
    ] = None,
) -> None:
    """Make a key. It is shown once; only its hash goes into the configuration."""
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
