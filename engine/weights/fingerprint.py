"""The identity of a checkpoint: SHA-256 over every byte that decides its numbers or its ids."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType

from engine.errors import ModelLoadError
from engine.model import Progress

_TAG = b"forebay/checkpoint/1"
_BUFFER_BYTES = 4 << 20
_POLL_S = 0.1


class Fingerprint:
    """Hashes files on its own thread while their weights are read; a context manager.

    The digest covers, for each file in the order of its name: the name, the size and the bytes.
    Moving a checkpoint to another directory does not change it. Leaving the context stops the
    thread, finished or not.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = sorted(files, key=lambda path: path.name)
        self._stop = threading.Event()
        self._done_bytes = 0
        self._total_bytes = sum(path.stat().st_size for path in self._files)
        self._worker = ThreadPoolExecutor(1, "fingerprint")
        self._digest: Future[str] = self._worker.submit(self._run)

    def __enter__(self) -> Fingerprint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._worker.shutdown()

    def result(self, progress: Progress | None) -> str:
        """Wait for the digest (hex), reporting how far it is. ModelLoadError if a file fails."""
        while True:
            try:
                return self._digest.result(timeout=_POLL_S)
            except FutureTimeoutError:
                if progress:
                    progress("fingerprint", self._done_bytes, self._total_bytes)

    def _run(self) -> str:
        state = hashlib.sha256(_TAG)
        buffer = bytearray(_BUFFER_BYTES)
        view = memoryview(buffer)
        for path in self._files:
            name, contents, size = path.name.encode(), hashlib.sha256(), 0
            try:
                with path.open("rb", buffering=0) as file:
                    while (count := file.readinto(buffer)) and not self._stop.is_set():
                        contents.update(view[:count])
                        size += count
                        self._done_bytes += count
            except OSError as error:
                raise ModelLoadError(f"{path}: {error.strerror or error}") from error
            for part in (name, size.to_bytes(8, "little"), contents.digest()):
                state.update(len(part).to_bytes(8, "little"))
                state.update(part)
        return state.hexdigest()
