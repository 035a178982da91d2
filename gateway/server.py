"""`forebay serve`: listen, load, answer, drain.

The port is taken first and answered from the start: while the models load, `/health/live` is 200
and everything else says that it is loading. Signals are handled here and not by uvicorn, which
would cut running streams.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from typing import Protocol

import structlog
import uvicorn
import uvloop
from starlette.types import ASGIApp

from engine.errors import EngineError
from gateway.announcing import announce
from gateway.config_variables import variables_without_effect
from gateway.credentials import (
    admin_key,
    known_secrets,
    server_secret,
    weak_keys,
    weakness_of_secret,
)
from gateway.fleet_control import FleetControl, LateFleetControl
from gateway.http_limits import BoundedHttpProtocol
from gateway.lifecycle import Lifecycle
from gateway.listening import HANDED_OVER, base_url, check_tls, listen
from gateway.load_progress import ReportProgress, show_progress
from gateway.logs import configure_logging
from gateway.loop_lag import watch_loop_lag
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.named_cache_store import LateNamedStore, NamedCacheStore
from gateway.open_files import raise_limit
from gateway.reload import ConfigSource, Reloader, RuntimeConfig, Snapshot
from gateway.settings import Settings
from gateway.settings_errors import ConfigError
from gateway.signals import on_signals
from gateway.state_dir import StateDir
from gateway.tenancy import Tenancy
from gateway.version import __version__

_log = structlog.get_logger("forebay.server")

_CUT_GRACE_S = 5.0
"""After the drain deadline: time for streams that were cut to send their error event."""
_CLOSE_GRACE_S = 2
"""After that: time for connections to flush before their tasks are cancelled."""
_GC_THRESHOLDS = (10_000, 20, 50)


class OpenFleet(Protocol):
    """Loads the models into `models`, starts their replicas and opens the books of `tenancy`;
    closing ends every stream that still runs.

    `progress` is called from loading threads and raises StartInterrupted when the server is told
    to stop: let it pass.
    """

    def __call__(
        self,
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
    ) -> AbstractAsyncContextManager[OpenedFleet]: ...


class OpenedFleet(FleetControl, Protocol):
    """What a fleet consists of once it is open."""

    @property
    def named_store(self) -> NamedCacheStore:
        """Where the tenants' named prefixes are kept."""
        ...

    async def apply(self, settings: Settings) -> None:
        """Put what a reload has changed to use."""
        ...


class MakeApp(Protocol):
    """Builds the application. `models` is empty until `lifecycle.ready`."""

    def __call__(
        self,
        *,
        runtime: RuntimeConfig,
        models: Models,
        metrics: Metrics,
        secret: bytes,
        lifecycle: Lifecycle,
        named_store: NamedCacheStore,
        control: FleetControl,
        tenancy: Tenancy,
    ) -> ASGIApp: ...


class StartInterrupted(Exception):
    """The server was told to stop while it was loading."""


def serve(source: ConfigSource, *, open_fleet: OpenFleet, make_app: MakeApp) -> int:
    """Serve until told to stop; returns the exit code.

    0 after a stop, also one whose deadline cut streams off; 1 if a model cannot be loaded or the
    server broke down. Raises PortUnavailable before anything is loaded, and ConfigError, also for
    what only starting could tell.
    """
    snapshot = source.load()
    server = snapshot.settings.server
    secret = server_secret(snapshot.settings, source.environ)
    check_tls(server.tls)
    secrets = set(known_secrets(snapshot.settings, source.environ))
    demo_key = None
    if source.path is None:
        demo_key = StateDir.open(source.environ).demo_key()
        operators = admin_key(snapshot.settings, source.environ, embedded=True)
        secrets |= {key for key in (demo_key, operators) if key}
    configure_logging(server.log_format, server.log_level, secrets=secrets)
    if (weakness := weakness_of_secret(snapshot.settings, source.environ)) is not None:
        _log.warning("the server secret is weak", reason=weakness)
    for weakness in weak_keys(snapshot.settings, source.environ):
        _log.warning("a key is weak", reason=weakness)
    for variable, meant in variables_without_effect(snapshot.settings, source.environ).items():
        _log.warning("a variable is ignored", variable=variable, did_you_mean=meant)
    # One of several that share a port: others answer while this one loads.
    shares_port = HANDED_OVER in os.environ
    sockets = listen(server.host, server.port)
    try:
        if (files := raise_limit()) is not None:
            _log.warning("few files may be open, and connections count", at_most=files)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            process = _Process(
                source,
                snapshot,
                secret,
                sockets,
                open_fleet,
                make_app,
                demo_key,
                shares_port=shares_port,
            )
            return runner.run(process.run())
    finally:
        for listener in sockets:
            listener.close()


class _Process:
    """One run of the server, from loading to the last byte."""

    def __init__(
        self,
        source: ConfigSource,
        snapshot: Snapshot,
        secret: bytes,
        sockets: Sequence[socket.socket],
        open_fleet: OpenFleet,
        make_app: MakeApp,
        demo_key: str | None,
        *,
        shares_port: bool,
    ) -> None:
        settings = snapshot.settings
        self._settings = settings
        self._sockets = list(sockets)
        self._open_fleet = open_fleet
        self._demo_key = demo_key
        self._shares_port = shares_port
        self._runtime = RuntimeConfig(snapshot)
        self._metrics = Metrics(
            models=[model.name for model in settings.models],
            tenants=[tenant.id for tenant in settings.tenants],
            secret=secret,
        )
        self._metrics.config_loaded("success", reload=False)
        self._reloader = Reloader(source, self._runtime, self._metrics)
        self._environ = source.environ
        self._secret = secret
        self._models = Models()
        self._named_store = LateNamedStore()
        self._control = LateFleetControl()
        self._lifecycle = Lifecycle()
        self._tenancy = Tenancy(self._runtime, self._metrics, follow=self._reloader.catch_up)
        self._app = make_app(
            runtime=self._runtime,
            models=self._models,
            metrics=self._metrics,
            secret=secret,
            lifecycle=self._lifecycle,
            named_store=self._named_store,
            control=self._control,
            tenancy=self._tenancy,
        )
        self._stop = asyncio.Event()
        self._loaded = asyncio.Event()
        self._release = asyncio.Event()
        self._reloads: set[asyncio.Task[bool]] = set()

    async def run(self) -> int:
        """Listen, load, announce, wait for a signal, drain, close."""
        http = _HttpServer(self._app, self._settings)
        listening = asyncio.create_task(self._answer(http))
        fleet = asyncio.create_task(self._hold_fleet())
        watching = asyncio.create_task(self._reloader.watch())
        with (
            on_signals(self._on_stop, self._on_hangup),
            watch_loop_lag(self._metrics.observe_loop_lag),
        ):
            try:
                await _first(self._loaded.wait(), self._stop.wait(), fleet, listening)
                if self._loaded.is_set():
                    self._announce()
                    await _first(self._stop.wait(), fleet, listening)
                    await self._drain()
                self._lifecycle.drain()
                self._reloader.end()
                self._release.set()
                failure = await _outcome(fleet)
                await self._lifecycle.wait_idle(_CUT_GRACE_S)
            finally:
                watching.cancel()
                http.should_exit = True
                failure_of_http = await _outcome(listening)
                self._lifecycle.stopped()
        if self._loaded.is_set():
            _log.info("stopped")
        return _exit_code(failure or failure_of_http, stopping=self._stop.is_set())

    async def _answer(self, http: _HttpServer) -> None:
        """Answer from the start, to say that it is loading; or, where others answer meanwhile, once
        it is loaded: what the kernel hands to this one waits that long."""
        if self._shares_port:
            await _first(self._loaded.wait(), self._stop.wait(), self._release.wait())
        await http.serve(self._sockets)

    async def _hold_fleet(self) -> None:
        """Load, and keep the models open until released: one task, so that what is entered here is
        left here."""
        async with AsyncExitStack() as held:
            with show_progress() as show, _no_collections():

                def progress(what: str, done: int, total: int) -> None:
                    if self._lifecycle.draining:
                        raise StartInterrupted
                    show(what, done, total)

                fleet = await held.enter_async_context(
                    self._open_fleet(
                        self._settings,
                        models=self._models,
                        environ=self._environ,
                        secret=self._secret,
                        metrics=self._metrics,
                        progress=progress,
                        runtime=self._runtime,
                        tenancy=self._tenancy,
                        lifecycle=self._lifecycle,
                    )
                )
            self._named_store.use(fleet.named_store)
            self._control.use(fleet)
            self._reloader.on_change(fleet.apply)
            held.enter_context(_loaded_heap_at_rest())
            self._lifecycle.loaded()
            self._loaded.set()
            await self._release.wait()

    async def _drain(self) -> None:
        """Refuse new requests and give those in flight their time."""
        self._lifecycle.drain()
        seconds = self._runtime.current.settings.server.drain_s
        in_flight = self._lifecycle.in_flight
        _log.info("draining", in_flight=in_flight, at_most_s=seconds)
        self._tenancy.batches.stop_taking()
        if not await self._lifecycle.wait_idle(seconds):
            _log.warning("drain time is over, cutting off", in_flight=self._lifecycle.in_flight)

    def _announce(self) -> None:
        server = self._settings.server
        url = base_url(self._sockets, server.host, tls=server.tls.cert is not None)
        names = [model.name for model in self._settings.models]
        lines = [f"forebay {__version__} serves {', '.join(names)} at {url}"]
        if self._demo_key:
            lines.append(f"demo key: {self._demo_key}")
        lines.append(_first_request(url, names[0], self._demo_key))
        if not announce("\n".join(lines) + "\n"):
            _log.warning("standard output cannot be written to")
        _log.info("ready", url=url, models=names)
        _say_if_nobody_is_let_in(self._runtime.current)

    def _on_stop(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            # Not sys.exit: threads that compute cannot be asked to stop, and would be waited for.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + number)
        self._lifecycle.drain()  # from this moment on, not from when the main task wakes up
        self._stop.set()

    def _on_hangup(self) -> None:
        task = asyncio.ensure_future(self._reloader.reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own, on sockets that already listen."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        server = settings.server
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(server.keep_alive_s),
                timeout_graceful_shutdown=_CLOSE_GRACE_S,
                ssl_certfile=server.tls.cert,
                ssl_keyfile=server.tls.key,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles its signals itself."""
        yield


@contextmanager
def _no_collections() -> Iterator[None]:
    """Not while loading: of a million new objects nearly all stay, and walking them again and again
    takes half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _loaded_heap_at_rest() -> Iterator[None]:
    """Keep what is loaded by now out of garbage collections: walking the modules and vocabularies
    takes a tenth of a second, in which no stream gets a token. Requests leave no cycles behind, so
    that looking for some after every few of them is mostly in vain."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _first_request(url: str, model: str, demo_key: str | None) -> str:
    """A command to paste; without a demo key the shell is to know one."""
    key = demo_key or "$FOREBAY_API_KEY"
    # At temperature 1 so small a model as the bundled one says little that makes sense.
    sampling = '"temperature": 0.2, ' if demo_key else ""
    body = (
        f'{{"model": "{model}", {sampling}'
        '"messages": [{"role": "user", "content": "Say hello."}]}'
    )
    return (
        f'curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" '
        f"-H 'Content-Type: application/json' -d '{body}'"
    )


def _say_if_nobody_is_let_in(current: Snapshot) -> None:
    """Of tenants there may be none yet; without an operator's key there never will be one."""
    if current.settings.tenants:
        return
    if current.admin_key_digest is not None:
        _log.info("there are no tenants: `forebay tenants create` makes the first one")
    else:
        _log.warning(
            "there are no tenants and no operator's key, so that nobody is ever let in: put "
            "tenants into the configuration, or set the key, start again and make them with "
            "`forebay tenants create`",
            key_from=current.settings.server.admin_key_env,
        )


async def _first(*awaitables: Awaitable[object]) -> None:
    """Wait until one of these is done. Coroutines are given up then; tasks go on."""
    waiting = {asyncio.ensure_future(awaitable): awaitable for awaitable in awaitables}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, awaitable in waiting.items():
            if future is not awaitable:
                future.cancel()


async def _outcome(task: asyncio.Task[None]) -> BaseException | None:
    """Wait for the task; what it raised, None if nothing."""
    await asyncio.wait([task])
    return task.exception()


def _exit_code(failure: BaseException | None, *, stopping: bool) -> int:
    """Say what went wrong, if anything did."""
    if isinstance(failure, StartInterrupted) or (failure is None and stopping):
        return 0
    if isinstance(failure, ConfigError):
        raise failure  # such as a state directory in use
    if isinstance(failure, EngineError):
        sys.stderr.write(f"forebay: {failure}\n")
        return 1
    _log.error("the server broke down", exc_info=failure)
    sys.stderr.write("forebay: the server broke down; its log says where\n")
    return 1
