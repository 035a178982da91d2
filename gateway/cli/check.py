"""`forebay check`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.reload import ConfigSource


def check(config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]) -> None:
    """Validate a configuration file and say what it amounts to."""
    settings = ConfigSource(config, os.environ, {}).load().settings
    server = settings.server
    scheme = "https" if server.tls.cert else "http"
    typer.echo(f"{config}: valid")
    typer.echo(f"listens on {scheme}://{server.host}:{server.port}, metrics: {server.metrics}")
    for model in settings.models:
        typer.echo(
            f"model {model.name}: {model.path}, device {model.device}, dtype {model.dtype}, "
            f"context {model.max_context}, batch {model.max_running}"
        )
    for tenant in settings.tenants:
        limit = tenant.limits.concurrency
        typer.echo(
            f"tenant {tenant.id}: {len(tenant.keys)} key(s), models {', '.join(tenant.models)}, "
            f"concurrency {'unlimited' if limit is None else limit}, cache {tenant.cache.scope}"
        )
