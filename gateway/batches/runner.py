"""Runs batches: a gateway's share of everybody's lines, and what has to be done around them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import orjson
import structlog

from gateway.batches.file_store import FileStore
from gateway.batches.line_answer import LineAnswer
from gateway.batches.line_runner import FindCaller, LineRunner
from gateway.batches.line_store import LineKey, LineState, LineStore, Result, TakenLine
from gateway.batches.metrics import BatchCounts
from gateway.batches.output import OutputWriter, line_id
from gateway.batches.pace import Pace
from gateway.batches.patience import Patience
from gateway.batches.progress import BatchProgress, LeaseLost, Waiting
from gateway.batches.turns import is_away
from gateway.batches.validation import Validation
from gateway.errors import internal_error
from gateway.settings import Settings
from gateway.tenants import Caller

_log = structlog.get_logger("forebay.batch")

_SWEEP_S = 300.0
_LET_GO_S = 5.0
_RETRIED = frozenset({408, 429, 502, 503, 504})
"""Answers that say nothing of the line: it is tried again until its batch's window is over."""
_NEVER_FITS = "request_exceeds_limit"
"""Of a 429: the line alone is more than a limit allows, so that waiting does not help it."""


@dataclass(frozen=True, slots=True)
class Tempo:
    """`poll_s` is how often the database is asked what there is to do, `renew_s` how often it hears
    that lines still run, `pause_s` the first of the pauses that grow while something fails."""

    poll_s: float = 1.0
    renew_s: float = 5.0
    pause_s: float = 0.5


@dataclass(frozen=True, slots=True)
class _Running:
    """A line that is being run; `work` is its request."""

    batch: Waiting
    work: asyncio.Task[LineAnswer | None]


class BatchRunner:
    """One gateway's runner. It asks the database every now and then what there is to do, and at
    once when it is woken."""

    def __init__(
        self,
        files: FileStore,
        lines: LineStore,
        progress: BatchProgress,
        validation: Validation,
        output: OutputWriter,
        line_runner: LineRunner,
        find_caller: FindCaller,
        settings: Callable[[], Settings],
        tempo: Tempo,
    ) -> None:
        self._files = files
        self._lines = lines
        self._progress = progress
        self._validation = validation
        self._output = output
        self._line_runner = line_runner
        self._find_caller = find_caller
        self._settings = settings
        self._tempo = tempo
        self._running: dict[LineKey, _Running] = {}
        self._paces: dict[str, Pace] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._lines_wanted = asyncio.Event()
        self._work_wanted = asyncio.Event()
        self._patience = Patience(tempo.pause_s)
        self._draining = False
        self._sweep_at_s = 0.0
        self.counts = BatchCounts()

    @property
    def running(self) -> int:
        """Lines that run here now."""
        return len(self._running)

    def wake(self) -> None:
        """There is something to do."""
        self._lines_wanted.set()
        self._work_wanted.set()

    async def run(self) -> None:
        """Until `stop`, or until cancelled; then what this gateway holds is left to others."""
        tempo = self._tempo
        try:
            async with asyncio.TaskGroup() as tasks:
                # leases must be renewed at once when the database is back
                tasks.create_task(
                    self._patience.again(self._renew, tempo.renew_s, longest_pause_s=tempo.renew_s)
                )
                tasks.create_task(
                    self._patience.again(self._look_after_batches, tempo.poll_s, self._work_wanted)
                )
                await self._patience.again(
                    lambda: self._take_lines(tasks), tempo.poll_s, self._lines_wanted
                )
                for running in self._running.values():
                    running.work.cancel()
        finally:
            await self._let_go()

    def stop(self) -> None:
        """Cut off what runs, and end `run` once the database has been told what was under way: a
        transaction that is cut off may keep its locks for a while."""
        self._draining = True
        self._patience.stop()
        self._progress.leave()
        self.wake()

    def stop_taking(self) -> None:
        """Take nothing more; what runs goes on."""
        self._draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing more, and wait until no line runs here; False if that takes longer than
        `timeout_s`."""
        self.stop_taking()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _take_lines(self, tasks: asyncio.TaskGroup) -> None:
        """Fill the places that are free: those tenants first that have the fewest lines here, and
        of these who was given the fewest in this pass, as lines may end while others are taken."""
        most = self._settings().batch.concurrency
        if self._draining or len(self._running) >= most:
            return
        self._forget_paces()
        callers: dict[Waiting, Caller] = {}
        runnable = await self._progress.runnable()
        self.counts.runnable = len(runnable)
        for batch in runnable:
            # whoever does not know the key leaves its batches to others: they may know it
            if (caller := self._find_caller(batch.tenant, batch.key)) is not None:
                callers[batch] = caller
        begun: Counter[str] = Counter()
        while callers and len(self._running) < most and not self._draining:
            if begun.total() >= most:
                self._lines_wanted.set()  # others may have come meanwhile, who have had nothing yet
                return
            of_tenant = Counter(each.batch.tenant for each in self._running.values())
            batch = min(
                callers, key=lambda each: (of_tenant[each.tenant], begun[each.tenant], each.id)
            )
            tenants = len({each.tenant for each in callers})
            # half of an even share at a time, so that who has more lines takes what others leave
            share = max(1, (most - len(self._running)) // (2 * tenants))
            allowed = self._allowed(batch.id, share)
            taken = await self._lines.take(batch.id, allowed) if allowed else []
            begun[batch.tenant] += len(taken)
            for line in taken:
                self._start(tasks, line, batch, callers[batch])
            if not taken:
                del callers[batch]

    def _allowed(self, batch_id: str, share: int) -> int:
        pace = self._paces.get(batch_id)
        if pace is None:
            return share
        running = sum(key.batch == batch_id for key in self._running)
        return min(share, pace.allows(monotonic(), running))

    def _forget_paces(self) -> None:
        now_s = monotonic()
        for batch_id in [name for name, pace in self._paces.items() if pace.is_over(now_s)]:
            del self._paces[batch_id]

    def _start(
        self, tasks: asyncio.TaskGroup, line: TakenLine, batch: Waiting, caller: Caller
    ) -> None:
        work = tasks.create_task(self._answer(line, batch, caller))
        self._running[line.key] = _Running(batch, work)
        self.counts.running = len(self._running)
        self._idle.clear()
        tasks.create_task(self._see_through(line.key, work))

    async def _answer(self, line: TakenLine, batch: Waiting, caller: Caller) -> LineAnswer | None:
        """The line's answer; None if there is none for now."""
        name = line_id(line.key)
        try:
            return await self._line_runner.run(
                caller, batch.endpoint, orjson.loads(line.body), batch_id=batch.id, line_id=name
            )
        except (OSError, TimeoutError) as error:
            _log.warning("a line was not answered", line=name, error=type(error).__name__)
            return None
        except Exception:  # noqa: BLE001 - one line's fault must not end the others
            _log.exception("a line failed", line=name)
            return LineAnswer(500, internal_error(name).envelope(), name)

    async def _see_through(self, key: LineKey, work: asyncio.Task[LineAnswer | None]) -> None:
        """Wait for the answer and write it down."""
        try:
            await asyncio.wait([work])
            if not work.cancelled():
                await self._write_down(key, work.result())
        except Exception:  # noqa: BLE001 - the line's lease runs out, and somebody runs it again
            _log.exception("a line's answer could not be written down", line=line_id(key))
        finally:
            del self._running[key]
            self.counts.running = len(self._running)
            if not self._running:
                self._idle.set()
            self._lines_wanted.set()

    async def _write_down(self, key: LineKey, answer: LineAnswer | None) -> None:
        """However long it takes until the database answers: the answer has been paid for."""
        if answer is None or _comes_again(answer):
            self.counts.put_back += 1
            retry_after_s = None if answer is None else answer.retry_after_s
            pace = self._paces.setdefault(key.batch, Pace(self._tempo.pause_s))
            wait_s = pace.refused(monotonic(), retry_after_s)
            await self._patience.insist(lambda: self._lines.put_back(key, wait_s))
            return
        if (pace_of_batch := self._paces.get(key.batch)) is not None:
            pace_of_batch.answered()
        result = _result(answer)
        if not await self._patience.insist(lambda: self._lines.finish(key, result)):
            _log.warning("a line's answer came after its lease was lost", line=line_id(key))
        elif result.state is LineState.COMPLETED:
            self.counts.answered += 1
        else:
            self.counts.failed += 1

    async def _renew(self) -> None:
        """Hold on to what runs here, and stop what is not ours to run any more."""
        before = dict(self._running)
        if not before:
            return
        held = await self._lines.renew(before)
        for key, running in before.items():
            if key not in held and self._running.get(key) is running:
                running.work.cancel()

    async def _look_after_batches(self) -> None:
        """Everything but running lines, one batch at a time."""
        await self._progress.close()
        await self._finish()
        for batch in await self._progress.to_validate():
            if self._draining:
                return
            if (caller := self._find_caller(batch.tenant, batch.key)) is not None:
                await self._validate(batch, caller)
                await self._finish()
        if monotonic() >= self._sweep_at_s:
            self._sweep_at_s = monotonic() + _SWEEP_S
            await self._files.sweep()
            await self._progress.sweep(self._settings().batch.file_ttl)

    async def _validate(self, batch: Waiting, caller: Caller) -> None:
        claimed = await self._progress.claim_to_validate(batch.id)
        if claimed is None:
            return
        try:
            await self._validation.run(claimed, caller.tenant, self._settings())
        except LeaseLost:
            _log.info("a batch changed hands while it was validated", batch=batch.id)
        self._lines_wanted.set()

    async def _finish(self) -> None:
        for batch in await self._progress.to_finish():
            if self._draining:
                return
            claimed = await self._progress.claim_to_finish(batch.id)
            if claimed is None:
                continue
            try:
                await self._output.run(claimed, self._settings().batch.file_ttl)
            except LeaseLost:
                _log.info("a batch changed hands while its files were written", batch=batch.id)

    async def _let_go(self) -> None:
        try:
            async with asyncio.timeout(_LET_GO_S):
                lines = await self._lines.let_go()
                await self._progress.let_go()
        except Exception as error:
            if not is_away(error):
                raise
            _log.warning("leases of batches are left to run out", error=type(error).__name__)
        else:
            if lines:
                _log.info("lines of batches are left to others", lines=lines)


def _comes_again(answer: LineAnswer) -> bool:
    """Whether the line may fare better later."""
    error = answer.body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return answer.status_code in _RETRIED and code != _NEVER_FITS


def _result(answer: LineAnswer) -> Result:
    response = {
        "status_code": answer.status_code,
        "request_id": answer.request_id,
        "body": answer.body,
    }
    well = 200 <= answer.status_code < 300
    state = LineState.COMPLETED if well else LineState.FAILED
    return Result(state, orjson.dumps(response).decode(), None)
