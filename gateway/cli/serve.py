"""`forebay serve`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli import exit_codes
from gateway.cli.errors import CommandError
from gateway.listening import HANDED_OVER
from gateway.signals import hangups_ignored

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gateway.fleet_control import FleetControl
    from gateway.lifecycle import Lifecycle
    from gateway.load_progress import ReportProgress
    from gateway.metrics import Metrics
    from gateway.models import Models
    from gateway.named_cache_store import NamedCacheStore
    from gateway.reload import ConfigSource, RuntimeConfig
    from gateway.server import OpenedFleet, OpenFleet
    from gateway.settings import Settings
    from gateway.tenancy import Tenancy

_LAST_PORT = 65_535


def serve_command(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="YAML file; without one, the bundled model is served."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[str | None, typer.Option(help="Port to listen on; 0 is any free one.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Serve this .gguf file or Hugging Face directory instead of the models."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Processes that share the port; remote models only.")
    ] = 1,
    worker_ports: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_LAST_PORT,
            help="Each worker by itself too: the first on this port, and so on.",
        ),
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, json or console.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> int:
    """Load the models and answer requests until told to stop."""
    given = {
        "--host": host,
        "--port": port,
        "--model": model,
        "--log-format": log_format,
        "--log-level": log_level,
    }
    flags = {flag: value for flag, value in given.items() if value is not None}
    if worker_ports is not None and workers == 1:
        raise CommandError("--worker-ports: needs --workers", exit_code=exit_codes.USAGE)
    with hangups_ignored():  # one that came before the server heeds it would end it
        # It takes longer to import than most commands run, so not when another one is asked for.
        from gateway.reload import ConfigSource

        source = ConfigSource(config, os.environ, flags)
        if workers > 1:
            return _serve_with_workers(source, workers, worker_ports)
        from gateway.server import serve

        if HANDED_OVER in os.environ:
            # Others listen on the port as well, and a request of theirs is not to wait for this.
            _import_fleet()
        return serve(source, open_fleet=_open_fleet, make_app=_make_app)


def _serve_with_workers(source: ConfigSource, count: int, first_port: int | None) -> int:
    if first_port is not None and first_port + count - 1 > _LAST_PORT:
        raise CommandError(
            f"--worker-ports: there are no {count} ports from {first_port} on",
            exit_code=exit_codes.USAGE,
        )
    from gateway.cli.serve_workers import serve_with_workers

    repeated = [] if source.path is None else ["--config", str(source.path)]
    for flag, value in source.flags.items():
        repeated += [flag, value]
    return serve_with_workers(source, count, first_port, repeated)


# torch takes seconds to import. Both imports below happen once the port is taken and answered, so
# that a mistake in the configuration or a busy port is said at once; but for one of several on a
# port, whose parent has said so already.


@asynccontextmanager
async def _open_fleet(
    settings: Settings,
    *,
    models: Models,
    environ: Mapping[str, str],
    secret: bytes,
    metrics: Metrics,
    progress: ReportProgress,
    runtime: RuntimeConfig,
    tenancy: Tenancy,
    lifecycle: Lifecycle,
) -> AsyncIterator[OpenedFleet]:
    open_gateway = await asyncio.to_thread(_import_fleet)
    async with open_gateway(
        settings,
        models=models,
        environ=environ,
        secret=secret,
        metrics=metrics,
        progress=progress,
        runtime=runtime,
        tenancy=tenancy,
        lifecycle=lifecycle,
    ) as fleet:
        yield fleet


def _import_fleet() -> OpenFleet:
    from gateway.opening import open_gateway

    return open_gateway


def _make_app(
    *,
    runtime: RuntimeConfig,
    models: Models,
    metrics: Metrics,
    secret: bytes,
    lifecycle: Lifecycle,
    named_store: NamedCacheStore,
    control: FleetControl,
    tenancy: Tenancy,
) -> ASGIApp:
    from gateway.app import create_app

    return create_app(
        runtime,
        models,
        metrics,
        secret,
        lifecycle,
        named_store=named_store,
        control=control,
        tenancy=tenancy,
    )
