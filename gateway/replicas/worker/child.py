"""The worker's side: one engine behind one socket, from the first message to the last.

The main thread loads, waits for the end and closes; one thread listens, one gives signs of life
whatever the step loop does. Steps are told from the engine's own thread.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal, cast

import structlog

from cache.report import CacheStats
from engine.errors import EngineError
from engine.report import StepReport
from gateway.load_progress import ReportProgress
from gateway.logs import LogLevel, configure_logging
from gateway.replicas.engine_facts import EngineFacts
from gateway.replicas.step_engine import Sink, StepEngine
from gateway.replicas.worker.cores import bind_to
from gateway.replicas.worker.frames import BadFrame, to_worker
from gateway.replicas.worker.messages import (
    Abort,
    Answer,
    Beat,
    Erase,
    Fatal,
    Open,
    Progress,
    Ready,
    SetShares,
    Step,
    Stop,
    Submit,
    TakeSnapshot,
    ToWorker,
)
from gateway.replicas.worker.outbox import Outbox

_log = structlog.get_logger("forebay.worker")

BEAT_S = 0.25
_PROGRESS_EVERY_S = 0.1
_READ_BYTES = 1 << 18
_CALL_THREADS = 4
_FLUSH_S = 5.0
_ORPHAN_S = 5.0
"""How long a worker without its gateway may save what it has: another may be waiting for the
memory."""

End = Literal["stopped", "gateway gone", "engine died"]


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine that is loaded and not started, and what there is to know of it."""

    engine: StepEngine
    facts: EngineFacts


OpenEngine = Callable[[Open, Sink, ReportProgress], AbstractContextManager[OpenedEngine]]
"""Loads what the message names; leaving the scope stops the engine and saves its cache."""


def work(descriptor: int, open_engine: OpenEngine) -> int:
    """Serve the gateway at the other end of the socket until one of both ends; the exit code."""
    os.dup2(2, 1)  # what a library prints is a line of the log like others
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)
        return _Worker(connection, open_engine).run()


class _Stopped(Exception):
    """Told to stop while loading."""


class _Worker:
    def __init__(self, connection: socket.socket, open_engine: OpenEngine) -> None:
        self._socket = connection
        self._open_engine = open_engine
        self._outbox = Outbox(connection)
        self._orders: SimpleQueue[Open | None] = SimpleQueue()
        self._ends: SimpleQueue[End] = SimpleQueue()
        self._stopping = False
        self._told_to_stop = False
        self._opened = threading.Event()
        self._over = threading.Event()
        self._engine: StepEngine | None = None
        self._telling = threading.Lock()
        self._cache: CacheStats | None = None  # as last told; guarded by _telling
        self._progress_at_s = 0.0

    def run(self) -> int:
        """From the first message to the last; the exit code."""
        signal.signal(signal.SIGTERM, lambda *_: self._give_up())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _start_thread(self._listen, "forebay-listen")
        order = self._orders.get()
        if order is None:
            return 1
        configure_logging("json", cast("LogLevel", order.log_level))
        with self._signs_of_life():
            try:
                return self._serve(order)
            except _Stopped:
                return 0
            except EngineError as error:
                self._outbox.send(Fatal(str(error)))
            except Exception as error:  # noqa: BLE001 - the process's last word
                _log.exception("the worker broke down")
                self._outbox.send(Fatal(f"the worker broke down: {type(error).__name__}"))
            return 1

    def _serve(self, order: Open) -> int:
        bind_to(order.cores.cpus)
        with self._open_engine(order, self._carry, self._say_progress) as opened:
            # Modules and vocabularies stay: a garbage collection that walks them takes longer than
            # any step.
            gc.collect()
            gc.freeze()
            gc.enable()
            engine = self._engine = opened.engine
            self._outbox.send(Ready(opened.facts, engine.stats(), engine.cache_stats()))
            engine.start()
            if order.shares is not None:
                engine.set_shares(order.shares.device, order.shares.dram, order.shares.redis)
            self._opened.set()
            end = self._ends.get()
        return 1 if end == "engine died" else 0

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Also while the engine is closed, which takes long when much is to be saved."""
        beating = _start_thread(self._beat, "forebay-beat")
        try:
            yield
        finally:
            self._over.set()
            beating.join()
            self._outbox.close(_FLUSH_S)

    def _give_up(self) -> None:
        """On SIGTERM. A service manager may send it to every process of a service at once: as long
        as the gateway drains, and has not said that it is time, it means the gateway alone."""
        if self._told_to_stop:
            os._exit(1)

    def _stop(self, end: End) -> None:
        self._stopping = True
        self._ends.put(end)

    def _listen(self) -> None:
        try:
            self._obey_all()
        except OSError:
            pass  # reset: as good as the end
        except BadFrame as error:
            _log.error("the gateway cannot be understood", problem=str(error))
        finally:
            self._orders.put(None)
            self._stop("gateway gone")
            # a thread of its own: the process must also end if nothing else gets anywhere
            last_resort = threading.Timer(_ORPHAN_S, os._exit, (1,))
            last_resort.daemon = True
            last_resort.start()

    def _obey_all(self) -> None:
        reader = to_worker()
        with ThreadPoolExecutor(_CALL_THREADS, "forebay-call") as calls:
            while data := self._socket.recv(_READ_BYTES):
                for message in reader.feed(data):
                    self._obey(message, calls)

    def _obey(self, message: ToWorker, calls: ThreadPoolExecutor) -> None:
        match message:
            case Open():
                self._orders.put(message)
            case Stop():
                self._told_to_stop = True
                self._stop("stopped")
            case Submit():
                with suppress(EngineError):  # it ends: the gateway hears of that and of all it lost
                    self._ready_engine().submit(message.request)
            case Abort():
                self._ready_engine().abort(message.request_id)
            case Erase() | SetShares() | TakeSnapshot():
                calls.submit(self._answer, message)

    def _ready_engine(self) -> StepEngine:
        """What the gateway says after `Ready` may come before the engine steps."""
        self._opened.wait()
        assert self._engine is not None
        return self._engine

    def _answer(self, message: Erase | SetShares | TakeSnapshot) -> None:
        """Do what may take long, on a thread that has time."""
        try:
            answer = self._answer_to(message)
            self._say_standing()  # in front, so that whoever asked sees what it has done
            self._outbox.send(answer)
        except EngineError as error:
            self._outbox.send(Answer(message.call, error=str(error)))
        except Exception as error:  # noqa: BLE001 - one call's fault must not end the others
            _log.exception("a call failed")
            self._outbox.send(Answer(message.call, error=type(error).__name__))

    def _answer_to(self, message: Erase | SetShares | TakeSnapshot) -> Answer:
        engine = self._ready_engine()
        match message:
            case Erase():
                erased = engine.erase_cache(message.tenant, message.scope)
                return Answer(message.call, erased=erased)
            case SetShares():
                shares = message.shares
                engine.set_shares(shares.device, shares.dram, shares.redis)
                return Answer(message.call)
            case TakeSnapshot():
                return Answer(message.call, events=engine.block_snapshot())

    def _carry(self, report: StepReport) -> None:
        """The engine's sink, called on its thread."""
        self._outbox.send(Step(report))
        if not report.stats.alive and not self._stopping:
            self._stop("engine died")

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self._say_standing()
            except Exception:  # noqa: BLE001 - a sign of life is due whatever the books say
                _log.exception("the engine cannot tell how it stands")
                self._outbox.send(Beat(None, None))

    def _say_standing(self) -> None:
        engine = self._engine
        if engine is None:
            self._outbox.send(Beat(None, None))
            return
        with self._telling:  # what is told last is what was read last
            cache = engine.cache_stats()
            changed = cache != self._cache
            self._cache = cache
            self._outbox.send(Beat(engine.stats(), cache if changed else None))

    def _say_progress(self, what: str, done: int, total: int) -> None:
        """Raises _Stopped when loading is not wanted any more."""
        if self._stopping:
            raise _Stopped
        now_s = time.monotonic()
        if done == total or now_s - self._progress_at_s >= _PROGRESS_EVERY_S:
            self._progress_at_s = now_s
            self._outbox.send(Progress(what, done, total))


def _start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
