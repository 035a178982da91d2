"""`forebay serve --workers N`: several gateways on one port, under a parent that serves nothing.

Each worker is a `forebay serve` that was handed its sockets. They share what gateways on different
machines share, no more: the secret, Redis, and the configuration.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog

import gateway.die_with_parent
from gateway.cli.workers import Workers
from gateway.credentials import known_secrets, server_secret
from gateway.embedded_redis import embedded_redis
from gateway.listening import HANDED_OVER, WORKERS, check_tls
from gateway.logs import configure_logging
from gateway.reload import ConfigSource, refuse_restart_changes
from gateway.settings import Settings
from gateway.settings_errors import ConfigError
from gateway.shared_port import SharedPort
from gateway.state_dir import StateDir

_log = structlog.get_logger("forebay.workers")

_LONGEST_LINE_BYTES = 1 << 20
_LAUNCHER = str(Path(gateway.die_with_parent.__file__))


def serve_with_workers(
    source: ConfigSource, count: int, first_port: int | None, flags: Sequence[str]
) -> int:
    """Serve with `count` workers until told to stop; returns the exit code.

    Worker i listens on `first_port` + i too, if that is given, so that it can be asked alone.
    `flags` are those of `forebay serve` that each worker is to get. Raises ConfigError, and
    PortUnavailable, before any worker is started.
    """
    settings = source.load().settings
    _refuse_what_cannot_be_shared(settings)
    server, environ = settings.server, source.environ
    check_tls(server.tls)
    secret = server_secret(settings, environ)  # made here, if it must be, for all of them
    configure_logging(server.log_format, server.log_level, secrets=known_secrets(settings, environ))
    with ExitStack() as held:
        port = held.enter_context(SharedPort.reserved(server.host, server.port))
        own_ports = [] if first_port is None else range(first_port, first_port + count)
        own = [
            held.enter_context(SharedPort.reserved(server.host, own_port)) for own_port in own_ports
        ]
        if settings.redis.embedded:
            # The workers find it running and use it: it outlives each of them.
            memory = settings.redis.memory
            held.enter_context(
                embedded_redis(StateDir.open(environ), memory, environ, secret=secret)
            )

        if own:
            _log.info("each worker by itself", ports=[each.port for each in own])
        else:
            _log.info("metrics are of whichever worker answers; --worker-ports gives each its own")

        # -P: what lies in the working directory is not imported in place of forebay's own rooms
        command = [sys.executable, "-P", "-m", "gateway.cli", "serve", *flags]

        begun: set[int] = set()

        async def spawn(index: int) -> Process:
            if index in begun:
                await asyncio.to_thread(require_same, source, settings)
            begun.add(index)
            ports = [port, *own[index : index + 1]]
            return await start_worker(ports, command, {**environ, WORKERS: str(count)})

        code = asyncio.run(Workers(count, spawn).run())
        if code > 128:
            # At once, as a single gateway does; the embedded Redis sees it, saves and ends.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code


def _refuse_what_cannot_be_shared(settings: Settings) -> None:
    if sys.platform != "linux":
        raise ConfigError(["--workers: only Linux shares a port evenly; leave it out"])
    here = [model.name for model in settings.models if not model.remote]
    if here:
        raise ConfigError(
            [
                f"--workers: model {name} is run by the gateway itself, of which there can be one; "
                "make it remote, or leave --workers out"
                for name in here
            ]
        )


def require_same(source: ConfigSource, settings: Settings) -> None:
    """Raises ConfigError unless a worker that starts now would be as the others are, which began
    with `settings` and have followed what can be reloaded: clients do not choose whom they get."""
    refuse_restart_changes(settings, source.load().settings)


async def start_worker(
    ports: Sequence[SharedPort], command: Sequence[str], environ: Mapping[str, str]
) -> Process:
    """Start one worker that takes its sockets from `gateway.listening.listen`; should this process
    die, it is told to drain. Raises OSError."""
    with ExitStack() as handed:
        sockets = [each for port in ports for each in handed.enter_context(port.sockets())]
        descriptors = [each.fileno() for each in sockets]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid())),
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            limit=_LONGEST_LINE_BYTES,
            env={**environ, HANDED_OVER: ",".join(map(str, descriptors))},
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone
        )
