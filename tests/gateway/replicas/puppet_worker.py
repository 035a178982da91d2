"""A worker's process around an engine that only pretends: no model, no torch, up in a moment.

Run as `python -m tests.gateway.replicas.puppet_worker FD`. A request's tokens follow from its
prompt; its first prompt token may be one of the orders below.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache.block import Tier
from cache.block_events import BlockEvents, TierChange
from cache.report import CacheStats, Erased, TenantShare, TierStats
from engine.errors import EngineError, ModelLoadError
from engine.report import EngineStats, Peaks, StepReport, StepWork
from engine.request import EngineOutput, EngineRequest, FinishReason
from gateway.replicas.engine_facts import EngineFacts
from gateway.replicas.step_engine import Sink
from gateway.replicas.worker.child import OpenedEngine, work
from gateway.replicas.worker.messages import Open
from policies.cost import Coefficients

ENDLESS, FAIL, DIE, EXIT, GARBLE, FREEZE, GUSH = range(9001, 9008)
"""Go on until aborted; fail this request; end the step loop; end the process; write nonsense on the
socket; let the step loop stand still; generate without a pause."""

COST = Coefficients(*(0.001 * i for i in range(9)), step_tokens=256, block_tokens=16)
PEAKS = Peaks(flops_per_s=4e9, bytes_per_s=1e10)
WORK = StepWork(flops=1_000_000, bytes=5_000_000, prefill=False)
"""Of each step, which takes a millisecond by its own account."""
STEP_S = 0.002
_log = logging.getLogger("forebay.puppet")


def token(prompt: list[int] | tuple[int, ...], position: int) -> int:
    """What is generated at a position behind a prompt."""
    return (sum(prompt) + 7 * position) % 251


def expected(prompt: list[int], count: int = 8) -> list[int]:
    """The first tokens behind a prompt."""
    return [token(prompt, position) for position in range(count)]


class PuppetEngine:
    """Steps on a thread of its own, one token for each request, and keeps the books of it."""

    def __init__(self, sink: Sink, descriptor: int) -> None:
        self._sink = sink
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._running: dict[str, tuple[EngineRequest, int]] = {}
        self._aborted: list[str] = []
        self._stopping = threading.Event()
        self._alive = True
        self._steps = 0
        self._erased = 0
        self._frozen_since: float | None = None
        self._shares: tuple[int, int, int] = (0, 0, 0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        if not self._alive:
            raise EngineError("the engine has stopped")
        with self._lock:
            self._running[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._aborted.append(request_id)

    def stats(self) -> EngineStats:
        age_s = 0.0 if self._frozen_since is None else time.monotonic() - self._frozen_since
        running = len(self._running)
        return EngineStats(
            0, running, 9, 0, running, 9 + running, 0, self._steps, self._alive, age_s
        )

    def cache_stats(self) -> CacheStats:
        tiers = (TierStats(Tier.DEVICE, evictions=self._erased),)
        return CacheStats(tiers, (TenantShare(b"t" * 8, *self._shares),))

    def erase_cache(self, tenant: bytes | None, scope: bytes | None) -> Erased:
        if tenant == b"cannot":
            raise EngineError("the engine has stopped")
        self._erased += 1
        return Erased(len(tenant or b""), len(scope or b""), None)

    def set_shares(self, device, dram, redis) -> None:
        self._shares = (len(device), len(dram), sum(redis.values()))

    def block_snapshot(self) -> BlockEvents:
        return BlockEvents(7, 3, (TierChange(Tier.DEVICE, (b"x" * 16,)),), snapshot=True)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        if saved := os.environ.get("PUPPET_SAVES"):
            Path(saved).write_text("saved")

    def _run(self) -> None:
        self._sink(StepReport((), 0.0, 0, 0, self.stats(), cost=COST))
        try:
            while not self._stopping.wait(self._pause_s()):
                self._step()
            reason = FinishReason.ABORT
        except RuntimeError:
            reason = FinishReason.ERROR
        self._alive = False
        ends = tuple(EngineOutput(name, (), (), 0, reason) for name in self._running)
        self._running.clear()
        self._sink(StepReport(ends, 0.0, 0, 0, self.stats()))

    def _step(self) -> None:
        with self._lock:
            aborted = [name for name in self._aborted if self._running.pop(name, None)]
            self._aborted.clear()
            running = list(self._running.items())
        outputs = [EngineOutput(name, (), (), 0, FinishReason.ABORT) for name in aborted]
        for name, (request, done) in running:
            output = self._output(name, request, done)
            outputs.append(output)
            with self._lock:
                if output.finish_reason is None:
                    self._running[name] = (request, done + 1)
                else:
                    del self._running[name]
        if outputs:
            self._steps += 1
            work = WORK if running else None
            count, stats = len(running), self.stats()
            self._sink(StepReport(tuple(outputs), 0.001, count, count, stats, work=work))

    def _pause_s(self) -> float:
        rush = any(request.prompt_token_ids[0] == GUSH for request, _ in self._running.values())
        return 0.0 if rush else STEP_S

    def _output(self, name: str, request: EngineRequest, done: int) -> EngineOutput:
        prompt = request.prompt_token_ids
        match prompt[0]:
            case value if value == FAIL:
                return EngineOutput(name, (), (), 0, FinishReason.ERROR, error="as ordered")
            case value if done == 3 and value == DIE:
                raise RuntimeError("as ordered")
            case value if done == 3 and value == EXIT:
                os._exit(3)
            case value if done == 3 and value == GARBLE:
                os.write(self._descriptor, b"\x05\0\0\0nonsense")
            case value if done == 3 and value == FREEZE:
                self._frozen_since = time.monotonic()
                self._stopping.wait()
        last = done + 1 == request.params.max_tokens and prompt[0] != ENDLESS
        return EngineOutput(
            name, (token(prompt, done),), (), 0, FinishReason.LENGTH if last else None
        )


@contextmanager
def open_puppet(order: Open, sink: Sink, progress) -> Iterator[OpenedEngine]:
    """What happens while loading is in the environment."""
    _log.warning("a line with %s", "arguments")
    sys.stderr.write("a line of no form\n")
    for done in range(5):
        progress("weights", done, 4)
    match os.environ.get("PUPPET_LOADING"):
        case "fails":
            raise ModelLoadError("/model: no such file or directory")
        case "crashes":
            os._exit(9)
        case "drags on":
            while True:
                progress("weights", 1, 4)
                time.sleep(0.01)
    facts = EngineFacts(
        "puppet",
        "cpu",
        "float32",
        "f" * 64,
        b"i" * 32,
        {"top_p": 0.5},
        512,
        256,
        16,
        1024,
        9,
        COST,
        PEAKS,
    )
    engine = PuppetEngine(sink, int(sys.argv[1]))
    try:
        yield OpenedEngine(engine, facts)
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(work(int(sys.argv[1]), open_puppet))
