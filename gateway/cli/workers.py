"""Several workers of one command: started, started again, told to stop, waited for.

What a worker is does not matter here: a process that writes its first line to standard output once
it is ready, drains at a SIGTERM, ends at once at a second one, and reloads at a SIGHUP.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from gateway.announcing import announce
from gateway.cli import exit_codes
from gateway.settings_errors import ConfigError
from gateway.signals import on_signals

_log = structlog.get_logger("forebay.workers")

_RETRY_S = (0.1, 1.0, 2.0, 5.0, 10.0, 30.0)
_CALM_S = 60.0
"""A worker that has run that long and ends is started at once; until then ever later."""
_CUT_S = 1.0
"""After a second signal: time to end by itself."""
_REFUSALS = frozenset({exit_codes.USAGE, exit_codes.PORT_UNAVAILABLE})

Spawn = Callable[[int], Awaitable[Process]]
"""Starts the worker of this index, its standard output a pipe. May raise OSError, and ConfigError
where the configuration is none that it may start with now."""


@dataclass(slots=True)
class _Running:
    """One run of a worker."""

    process: Process
    ready: bool = False
    reload_wanted: bool = False

    def signal(self, number: signal.Signals) -> None:
        # Not the process's own send_signal, which may take its exit code from who waits for it.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


@dataclass(slots=True)
class Workers:
    """`count` workers under one parent.

    They stand or fall together until all have been ready: a mistake that one of them finds at the
    start ends all. From then on each is started again when it ends, with growing pauses, whatever
    it ended of: the others hold the last good configuration.
    """

    count: int
    spawn: Spawn
    _stop: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _running: dict[int, _Running] = field(init=False, default_factory=dict)
    _been_ready: set[int] = field(init=False, default_factory=set)
    _announcement: list[str] = field(init=False, default_factory=list)
    _exit_code: int = field(init=False, default=exit_codes.OK)

    async def run(self) -> int:
        """Until SIGTERM or SIGINT, then until all have drained; returns the exit code.

        0 after a stop, 128 plus the signal's number after a second one; what a worker ended with
        if it did before all were ready. The first worker's output is passed on once all are ready,
        so that the address is announced when everybody behind it answers. To be called once.
        """
        with on_signals(self._on_stop, self._on_hangup):
            async with asyncio.TaskGroup() as keeping:
                for index in range(self.count):
                    keeping.create_task(self._keep(index))
        return self._exit_code

    @property
    def _standing(self) -> bool:
        return len(self._been_ready) == self.count

    async def _keep(self, index: int) -> None:
        """Run one worker, and another when it ends, until told to stop."""
        failures = 0
        while not self._stop.is_set():
            started_s = time.monotonic()
            code = await self._run_once(index)
            if self._stop.is_set():
                return
            if not self._standing:
                _log.error("a worker did not start, ending", worker=index, code=code)
                self._exit_code = code if code in _REFUSALS else exit_codes.FAILURE
                self._end_all()
                return
            failures = 1 if time.monotonic() - started_s > _CALM_S else failures + 1
            pause_s = _RETRY_S[min(failures, len(_RETRY_S)) - 1]
            _log.warning(
                "worker has ended, it is started again", worker=index, code=code, in_s=pause_s
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()

    async def _run_once(self, index: int) -> int:
        """One run from its start to its end; the exit code, negative for a signal's number."""
        try:
            process = await self.spawn(index)
        except OSError as error:
            _log.error("a worker cannot be started", worker=index, reason=error.strerror)
            return exit_codes.FAILURE
        except ConfigError as error:
            for message in error.messages:
                _log.error("config refused, a worker is not started", worker=index, reason=message)
            return exit_codes.USAGE
        worker = self._running[index] = _Running(process)
        try:
            if self._stop.is_set():  # while it was being started
                worker.signal(signal.SIGTERM)
            await self._read(index, worker)
            return await process.wait()
        finally:
            del self._running[index]
            if process.returncode is None:
                worker.signal(signal.SIGKILL)
                await process.wait()

    async def _read(self, index: int, worker: _Running) -> None:
        """What it writes, to the end. Only the first worker's first run is passed on: the others
        would say the same."""
        if worker.process.stdout is None:
            raise AssertionError("a worker's standard output is a pipe")
        passed_on = index == 0 and index not in self._been_ready
        async for line in worker.process.stdout:
            if passed_on:
                self._announcement.append(line.decode("utf-8", "replace"))
            if not worker.ready:
                self._is_ready(index, worker)
            if self._standing:
                self._announce()

    def _is_ready(self, index: int, worker: _Running) -> None:
        worker.ready = True
        if worker.reload_wanted:
            worker.signal(signal.SIGHUP)
        stood = self._standing
        self._been_ready.add(index)
        if self._standing and not stood:
            _log.info("workers are ready", workers=self.count)
        elif stood:
            _log.info("worker is ready again", worker=index, pid=worker.process.pid)

    def _announce(self) -> None:
        if self._announcement:
            announce("".join(self._announcement))
            self._announcement.clear()

    def _on_stop(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self._exit_code = 128 + number
            # Two signals in a row may reach a worker as one, which it would take for the first.
            asyncio.get_running_loop().call_later(_CUT_S, self._signal_all, signal.SIGKILL)
        self._end_all()

    def _end_all(self) -> None:
        self._stop.set()
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._running.values():
            worker.signal(number)

    def _on_hangup(self) -> None:
        """A worker that is still starting might not survive it, and gets it when it is ready."""
        for worker in self._running.values():
            if worker.ready:
                worker.signal(signal.SIGHUP)
            else:
                worker.reload_wanted = True
