"""Moves blocks between device pages and host slots while the step loop goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from cache.host_arena import HostArena

_log = logging.getLogger("forebay.cache")

_PIECE_BYTES = 4 << 20
"""So much is copied before a waiting upload is looked for: well under a millisecond."""

_CUDA_PIECE_BYTES = 16 << 20

Done = Callable[[float | None], None]
"""Called once per transfer, from the copier's thread: the seconds the copying itself took, or None
if it failed, and then the destinations hold anything."""


class Copier(Protocol):
    """Copies blocks between `pages` and the arena's payloads.

    Calls come from the step loop's thread and return at once. What a copy reads and writes belongs
    to it until `done`: the caller keeps both page and slot held. Uploads go before downloads that
    have not begun, since a request waits for them and nobody waits for a write-back.
    """

    def download(self, moves: Sequence[tuple[int, int]], done: Done) -> None:
        """(page, slot) each: device page to host slot. Raises RuntimeError after `close`."""
        ...

    def upload(self, moves: Sequence[tuple[int, int]], done: Done) -> None:
        """(slot, page) each: host slot to device page. Raises RuntimeError after `close`."""
        ...

    def close(self) -> None:
        """Finish everything that was asked for, then end. Idempotent."""
        ...


def make_copier(pages: torch.Tensor, arena: HostArena) -> Copier:
    """The copier for where `pages` is. `pages`: uint8 [blocks, block_bytes]; the arena's blocks
    must be as large, and should be pinned if the pages are on a CUDA device."""
    if pages.ndim != 2 or pages.dtype != torch.uint8 or pages.shape[1] != arena.block_bytes:
        raise ValueError(
            f"pages are {pages.dtype} {list(pages.shape)}, the arena's blocks uint8 of"
            f" {arena.block_bytes} bytes"
        )
    if pages.device.type == "cuda":
        return CudaCopier(pages, arena)
    if pages.device.type == "cpu":
        return ThreadCopier(pages, arena)
    raise ValueError(f"no copier for device {pages.device}")


class _Job(NamedTuple):
    """One transfer. `upward`: from slots to pages."""

    upward: bool
    moves: tuple[tuple[int, int], ...]
    done: Done
    ready: torch.cuda.Event | None = None
    """What the caller had asked of the device before the copy."""


class ThreadCopier:
    """For pages in host memory: one thread. The copies let go of the interpreter lock."""

    def __init__(self, pages: torch.Tensor, arena: HostArena) -> None:
        self._pages, self._payloads = pages.numpy(), arena.payloads.numpy()
        self._queue = _JobQueue(self._pieces)

    def download(self, moves: Sequence[tuple[int, int]], done: Done) -> None:
        """See `Copier.download`."""
        self._queue.put(_Job(False, tuple(moves), done))

    def upload(self, moves: Sequence[tuple[int, int]], done: Done) -> None:
        """See `Copier.upload`."""
        self._queue.put(_Job(True, tuple(moves), done))

    def close(self) -> None:
        """See `Copier.close`."""
        self._queue.close()

    def _pieces(self, job: _Job) -> Iterator[float]:
        """A piece is a run of adjacent blocks, or a part of one that is larger than a piece. Each
        is one call on this thread alone: torch's own copy would take the step's cores."""
        sources, targets = self._payloads, self._pages
        if not job.upward:
            sources, targets = targets, sources
        block_bytes = sources.shape[1]
        columns = range(0, block_bytes, _PIECE_BYTES)
        for source, target, rows in _runs(job.moves, max(1, _PIECE_BYTES // block_bytes)):
            from_rows, to_rows = sources[source : source + rows], targets[target : target + rows]
            for start in columns:
                began = time.perf_counter()
                np.copyto(
                    to_rows[:, start : start + _PIECE_BYTES],
                    from_rows[:, start : start + _PIECE_BYTES],
                )
                yield time.perf_counter() - began


class CudaCopier:
    """For pages on a CUDA device: a stream of its own, fed and awaited by one thread.

    A copy begins when what the caller had queued on its current stream is through, by an event
    recorded at the call; nothing else is waited for. `done` comes when the bytes are there, so that
    whatever the caller launches after it sees them. An arena that is not pinned works too: the
    driver then stages the copies, and this thread waits for each.
    """

    def __init__(self, pages: torch.Tensor, arena: HostArena) -> None:
        self._device = pages.device
        # Block by block, made once: torch would stage a strided copy in memory of its own.
        self._pages, self._payloads = pages.unbind(), arena.payloads.unbind()
        self._piece_blocks = max(1, _CUDA_PIECE_BYTES // arena.block_bytes)
        self._stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call]  # torch's
        self._queue = _JobQueue(self._pieces)

    def download(self, moves: Sequence[tuple[int, int]], done: Done) -> None:
        """See `Copier.download`."""
        self._queue.put(_Job(False, tuple(moves), done, self._mark()))

    def upload(self, moves: Sequence[tuple[int, int]], done: Done) -> None:
        """See `Copier.upload`."""
        self._queue.put(_Job(True, tuple(moves), done, self._mark()))

    def close(self) -> None:
        """See `Copier.close`."""
        self._queue.close()

    def _mark(self) -> torch.cuda.Event:
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _pieces(self, job: _Job) -> Iterator[float]:
        """Two pieces are in flight at a time, so that the device does not wait for this thread."""
        if job.ready is not None:
            self._stream.wait_event(job.ready)
        launched: _Launched | None = None
        try:
            for start in range(0, len(job.moves), self._piece_blocks):
                moves = job.moves[start : start + self._piece_blocks]
                following = self._launch(moves, upward=job.upward)
                if launched is not None:
                    yield launched.wait_s()
                launched = following
            if launched is not None:
                yield launched.wait_s()
        except BaseException:
            self._stream.synchronize()  # nothing may be in flight once the failure is reported
            raise

    def _launch(self, moves: tuple[tuple[int, int], ...], *, upward: bool) -> _Launched:
        sources, targets = self._payloads, self._pages
        if not upward:
            sources, targets = targets, sources
        launched = _Launched(_event(enable_timing=True), _event(enable_timing=True, blocking=True))
        with torch.cuda.stream(self._stream):
            launched.began.record(self._stream)
            for source, target in moves:
                targets[target].copy_(sources[source], non_blocking=True)
            launched.ended.record(self._stream)
        return launched


class _Launched(NamedTuple):
    """A piece that the device has been told to copy."""

    began: torch.cuda.Event
    ended: torch.cuda.Event

    def wait_s(self) -> float:
        """Wait for it; how long the copying took."""
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1e3


def _event(*, enable_timing: bool = False, blocking: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing, blocking)  # type: ignore[no-untyped-call]  # torch's


def _runs(moves: Sequence[tuple[int, int]], most_rows: int) -> Iterator[tuple[int, int, int]]:
    """The moves in order as (source, target, blocks): adjacent on both sides."""
    at = 0
    while at < len(moves):
        source, target = moves[at]
        rows = 1
        while rows < most_rows and moves[at + rows : at + rows + 1] == (
            (source + rows, target + rows),
        ):
            rows += 1
        yield source, target, rows
        at += rows


class _JobQueue:
    """A thread that works jobs off piece by piece, those upward first, otherwise in order.

    `pieces` copies a job as it is iterated, and gives the seconds that each piece took.
    """

    def __init__(self, pieces: Callable[[_Job], Iterator[float]]) -> None:
        self._pieces = pieces
        self._upward: deque[_Job] = deque()
        self._downward: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="forebay-copier", daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        """Have the job done. Raises RuntimeError after `close`."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the copier is closed")
            (self._upward if job.upward else self._downward).append(job)
            self._changed.notify()

    def close(self) -> None:
        """Do what is queued, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._finish(job)

    def _next(self) -> _Job | None:
        with self._changed:
            while True:
                if self._upward:
                    return self._upward.popleft()
                if self._downward:
                    return self._downward.popleft()
                if self._closed:
                    return None
                self._changed.wait()

    def _finish(self, job: _Job) -> None:
        """Copy a job and report it; after each piece of a downward one, finish the upward ones."""
        try:
            seconds: float | None = self._copy(job)
        except Exception:  # noqa: BLE001 - the owner hears of it as None; the thread must go on
            _log.exception("copying %d blocks failed", len(job.moves))
            seconds = None
        try:
            job.done(seconds)
        except Exception:  # noqa: BLE001 - the receiver's fault must not end the copies of others
            _log.exception("the receiver of a finished copy failed")

    def _copy(self, job: _Job) -> float:
        seconds = 0.0
        for piece_s in self._pieces(job):
            seconds += piece_s
            while self._upward and not job.upward:
                self._finish(self._upward.popleft())
        return seconds
