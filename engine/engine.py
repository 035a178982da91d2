"""The step loop: schedule, run, sample, emit, on a thread of its own.

Requests and aborts come in from any thread and take effect at the next step; what a step produced
goes out in one call of the owner's sink. A step that computes long prompts is put aside half done
for a more urgent request that comes meanwhile, if the executor can do that. The engine knows token
ids, priorities and chain roots; it knows nothing of text, tenants or HTTP.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from cache.block_events import BlockEvents
from cache.block_pool import Share
from cache.report import CacheStats, Erased
from cache.tiered_cache import TieredCache
from engine.batching import BatchBuilder, step_shape
from engine.caching import device_only
from engine.computation import Computation, Computed
from engine.ending import EndRules, last_words
from engine.errors import BadLogits, EngineError, LogitsNotFinite
from engine.executors.base import Executor
from engine.pausing import Allowance, Pauses, gives_way_to
from engine.report import EngineStats, StepReport, StepWork
from engine.request import EngineOutput, EngineRequest, FinishReason
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence
from engine.step_work import ModelWork
from policies.batching import CONTINUOUS, Batching
from policies.cost import Coefficients, StepShape

_log = logging.getLogger("forebay.engine")

Sink = Callable[[StepReport], None]

T = TypeVar("T")
OpenCache = Callable[[Executor, Callable[[], None]], TieredCache]

_ERASURE_S = 60.0
_SAVE_S = 10.0
"""When stopping: so long blocks are written to Redis before the rest is given up."""
_NEWS_S = 0.05
_COST_S = 1.0
"""While stepping, what work takes is told so often."""
_REST_S = 1.0
"""After that long without work the engine is at rest: time to check its books."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How much an engine takes on. `step_tokens` is the token budget of one step, `max_running`
    the number of sequences in it, `max_context` the longest sequence in tokens; `batching` is not
    the continuous one only to be compared with it."""

    max_context: int
    max_running: int = 16
    step_tokens: int = 256
    prompt_logprob_tokens: int = 128
    batching: Batching = CONTINUOUS


class _Asked(NamedTuple):
    """What a step is to compute, in the terms of the cost model and of the device."""

    shape: StepShape
    work: StepWork | None


class Engine:
    """Owns an executor, its page pool and the thread that steps them."""

    def __init__(
        self,
        executor: Executor,
        eos_token_ids: frozenset[int],
        options: EngineOptions,
        sink: Sink,
        open_cache: OpenCache = device_only,
        model_work: ModelWork | None = None,
    ) -> None:
        """`sink` is called on the engine's thread after every step, and between steps when there is
        something to say; first of all with a snapshot of the tiers and what work takes.

        `open_cache` gets a function that wakes the step loop, callable from any thread. Without
        `model_work` reports say nothing of the work in a step.

        Raises EngineError unless the pages hold at least one sequence of `max_context` tokens.
        """
        block_tokens = executor.block_tokens
        blocks = int(executor.pages.shape[0])
        longest_blocks = -(-options.max_context // block_tokens)
        if blocks < longest_blocks:
            raise EngineError(
                f"the page pool holds {blocks * block_tokens} tokens, fewer than max_context "
                f"{options.max_context}: raise the model's cache.device or lower its max_context"
            )
        self._executor = executor
        self._model_work = model_work
        self._longest_blocks = longest_blocks
        self._rules = EndRules(options.max_context, eos_token_ids)
        self._options = options
        self._sink = sink
        self._wake = threading.Condition()
        self._cache = open_cache(executor, self._notify)
        self._scheduler = Scheduler(
            self._cache,
            block_tokens=block_tokens,
            step_tokens=options.step_tokens,
            max_running=options.max_running,
            prompt_logprob_tokens=options.prompt_logprob_tokens,
            batching=options.batching,
        )
        batches, beside = (
            BatchBuilder(
                max_running=options.max_running,
                max_context=options.max_context,
                max_blocks=longest_blocks,
                step_tokens=options.step_tokens,
            )
            for _ in range(2)
        )
        self._computation = Computation(executor, batches, beside)
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._steps = 0
        self._checked_steps = 0
        self._idle_since = time.monotonic()
        self._cost_told_s = -math.inf
        self._alive = True
        self._pauses = Pauses(executor)  # guarded by _wake, like the next four
        self._submitted: list[EngineRequest] = []
        self._aborted: list[str] = []
        self._calls: list[Callable[[], None]] = []
        self._stopping = False
        self._closed = False
        self._crashed = False
        self._thread = threading.Thread(target=self._run, name="forebay-engine", daemon=True)

    def start(self) -> None:
        """Start stepping."""
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Put a request in line. Its outcome, refusals included, comes through the sink.

        Raises EngineError if the engine has stopped.
        """
        with self._wake:
            if self._stopping or not self._alive:
                raise EngineError("the engine has stopped")
            self._submitted.append(request)
            self._pauses.came(request)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request: its slot and pages are free before the next step, but not while one lies
        aside. Unknown ids are fine."""
        with self._wake:
            self._aborted.append(request_id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        """A snapshot; exact between steps, at most one step old otherwise."""
        counts = self._scheduler.pool.counts()
        load = self._scheduler.load()
        submitted = self._submitted.copy()
        return EngineStats(
            waiting=self._scheduler.in_line + len(submitted),
            running=len(self._scheduler.running),
            pages_free=counts.free,
            pages_cached=counts.cached,
            pages_held=counts.held,
            pages_total=counts.total,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
            alive=self._alive,
            last_step_age_s=time.monotonic() - self._idle_since,
            pending_tokens=load.pending_tokens
            + sum(
                len(request.prompt_token_ids) + len(request.generated_token_ids)
                for request in submitted
            ),
            context_tokens=load.context_tokens,
        )

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread between two steps; returns what it returns.

        For what must see the pool at rest, such as integrity checks. Raises what it raises, and
        EngineError if the engine has stopped.
        """
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                answer.set_exception(error)

        with self._wake:
            if self._stopping or not self._alive:
                raise EngineError("the engine has stopped")
            self._calls.append(run)
            self._wake.notify()
        return answer.result()

    def block_snapshot(self) -> BlockEvents:
        """All that the tiers hold, as a batch of events that the next one follows.

        The sink gets it too, at its place among the others, so that who follows those cannot
        mistake their order. Raises EngineError if the engine has stopped.
        """
        return self.call(self._tell_snapshot)

    def cache_stats(self) -> CacheStats:
        """Every tier's counters. Any thread."""
        return self._cache.stats()

    def erase_cache(self, tenant: bytes | None, scope: bytes | None) -> Erased:
        """Remove an owner's blocks from every tier (`tenant` None: everybody's); blocks.

        What its running requests compute from now on is found by nobody. Raises EngineError if the
        engine has stopped; Redis is waited for, and None in the answer if it could not be asked.
        """
        local, redis = self.call(lambda: self._erase(tenant, scope))
        if redis is None:
            return local
        try:
            return replace(local, redis=redis.result(_ERASURE_S))
        except Exception as error:  # noqa: BLE001 - whatever it is, Redis was not cleared
            _log.warning("the cache in Redis could not be erased: %s", type(error).__name__)
            return replace(local, redis=None)

    def set_shares(
        self, device: Mapping[bytes, Share], dram: Mapping[bytes, Share], redis: Mapping[bytes, int]
    ) -> None:
        """Put floors and quotas to use; see `TieredCache.set_shares`.

        Device floors are cut, all alike, where they would leave no room for the longest sequence.
        """
        floors = sum(share.floor for share in device.values())
        room = max(0, int(self._executor.pages.shape[0]) - self._longest_blocks - 1)
        if floors > room:
            _log.warning("device floors of %d blocks do not fit beside a sequence: cut", floors)
            device = {
                tenant: replace(share, floor=share.floor * room // floors)
                for tenant, share in device.items()
            }
        self.call(lambda: self._cache.set_shares(device, dram, redis))

    def check_integrity(self) -> None:
        """Assert the tiers' invariants between two steps; with nothing running, that no page is
        held."""
        self.call(self._check_cache)

    def close(self) -> None:
        """Abort what runs, stop the thread, save the cache, close the executor. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._closed:
            return
        self._closed = True
        with closing(self._executor), closing(self._cache):
            if self._thread.ident is not None:
                self._thread.join()
                if not self._crashed:
                    self._cache.save(_SAVE_S)

    def _run(self) -> None:
        try:
            self._tell_snapshot()
            while self._take_in():
                self._step()
        except BaseException:  # noqa: BLE001 - the thread's last word; the owner sees alive=False
            self._crashed = True
            _log.exception("the step loop died")
        finally:
            with self._wake:
                self._alive = False
                calls, self._calls = self._calls, []
            for call in calls:
                call()
            self._emit(self._end_all(), 0.0, 0, 0)

    def _take_in(self) -> bool:
        """Wait for work, then apply what came in; False when it is time to stop."""
        if not self._sequences:
            self._tell_changes()
        while not self._wait_for_work(_REST_S):
            self._check_at_rest()
        with self._wake:
            if self._stopping:
                return False
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, []
            calls, self._calls = self._calls, []
        self._cache.settle()
        outputs = [output for request in submitted if (output := self._accept(request))]
        outputs += [output for request_id in aborted if (output := self._abort(request_id))]
        # behind the requests that came before them: an erasure must know those of its owner
        for call in calls:
            call()
        if outputs:
            self._emit(outputs, 0.0, 0, 0)
        return True

    def _wait_for_work(self, timeout_s: float) -> bool:
        with self._wake:
            if not self._has_work():
                self._idle_since = time.monotonic()
                self._wake.wait(timeout_s)
            return self._has_work()

    def _has_work(self) -> bool:
        return bool(self._sequences) or self._has_news()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _check_at_rest(self) -> None:
        """Check the pool's books, once for every time that the engine comes to rest."""
        if self._checked_steps == self._steps:
            return
        self._checked_steps = self._steps
        try:
            self._check_cache()
        except AssertionError:
            _log.exception("the cache's books are wrong")

    def _check_cache(self) -> None:
        self._cache.check_integrity()
        if not self._scheduler.running and not self._scheduler.loading and self._cache.quiet:
            assert self._cache.device.counts().held == 0, "an idle engine holds pages"

    def _erase(
        self, tenant: bytes | None, scope: bytes | None
    ) -> tuple[Erased, Future[int] | None]:
        for sequence in self._sequences.values():
            owner = sequence.request.owner
            if tenant in (None, owner.tenant) and scope in (None, owner.scope):
                sequence.erased = True
        return self._cache.erase(tenant, scope)

    def _accept(self, request: EngineRequest) -> EngineOutput | None:
        """Put the request in line, or say why not."""
        problem = self._rules.problem_of(request)
        if request.request_id in self._sequences:
            problem = "a request of this id is running"
        if problem:
            return last_words(request.request_id, FinishReason.ERROR, 0, problem)
        sequence: Sequence | None = None
        try:
            sequence = Sequence(request, self._arrivals, time.monotonic())
            self._scheduler.add(sequence)
        except Exception as error:  # noqa: BLE001 - one request's fault must not end the others
            _log.exception("request %s cannot be taken in", request.request_id)
            if sequence is not None:  # it may be in line already, and searched for
                self._scheduler.remove(sequence)
            return last_words(request.request_id, FinishReason.ERROR, 0, type(error).__name__)
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        return None

    def _abort(self, request_id: str) -> EngineOutput | None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        self._scheduler.remove(sequence)
        return last_words(request_id, FinishReason.ABORT, sequence.cached_tokens)

    def _let_answers_in(self) -> None:
        """Put the step off a little for prompts that could begin in it."""
        while (due_s := self._cache.answer_due_s()) > 0:
            with self._wake:
                if not self._wake.wait_for(self._has_news, due_s) or not self._cache.has_mail:
                    return
            self._cache.settle()

    def _step(self) -> None:
        self._let_answers_in()
        chunks = self._scheduler.schedule()
        if not chunks:
            self._tell_changes()
            self._wait_for_news()
            return
        asked = self._asked(chunks)
        started = time.perf_counter()
        priority = gives_way_to(chunks) if self._pauses.possible else None
        if priority is None:
            self._end_step(self._computation.run(chunks), asked, started)
        else:
            computed, aside_s = self._run_giving_way(chunks, priority)
            self._end_step(computed, asked, started, aside_s)

    def _asked(self, chunks: Ordered[Chunk]) -> _Asked:
        work = None if self._model_work is None else self._model_work.of_step(chunks)
        return _Asked(step_shape(chunks), work)

    def _end_step(
        self, computed: Ordered[Computed], asked: _Asked, started_s: float, aside_s: float = 0.0
    ) -> None:
        """Commit and tell what a step brought that started at `started_s` (`time.perf_counter`) and
        of the time since lay aside for `aside_s`."""
        moved = [self._move_on(each) for each in computed]
        outputs = [output for output in moved if output is not None]
        self._steps += 1
        self._idle_since = time.monotonic()
        seconds = time.perf_counter() - started_s - aside_s
        shape = asked.shape
        events = self._cache.take_events()
        # what failed was perhaps not computed, and nobody knows how far
        failed = any(isinstance(each.outcome.chosen, Exception) for each in computed)
        work = None if failed else asked.work
        self._report(outputs, seconds, shape.tokens, shape.sequences, events, work)
        if not aside_s:  # one that was interrupted found the caches cold: no example of others
            self._cache.cost.observe_step(shape, seconds)
        self._cache.maintain()

    def _run_giving_way(
        self, chunks: Ordered[Chunk], priority: int
    ) -> tuple[Ordered[Computed], float]:
        """Compute the chunks; who comes with a lower priority meanwhile goes before. Returns also
        for how many seconds the step lay aside."""
        aside_s = 0.0
        allowance = Allowance(self._options.step_tokens)
        self._allow_pauses(priority)
        try:
            computed = self._computation.start(chunks)
            if computed is not None:
                return computed, aside_s
            with self._scheduler.put_aside(chunks):
                while computed is None:
                    paused = time.perf_counter()
                    self._run_beside(priority, allowance)
                    if not allowance.spent:
                        self._allow_pauses(priority)
                    aside_s += time.perf_counter() - paused
                    computed = self._computation.resume()
        finally:
            with self._wake:
                self._pauses.forbid()
        return computed, aside_s

    def _allow_pauses(self, priority: int) -> None:
        """Let the step give way to who comes with a lower priority, if he could begin: a pause in
        vain leaves the caches cold."""
        with self._wake:
            if self._scheduler.takes_newcomers and not self._stopping:
                self._pauses.allow(priority, self._submitted)

    def _run_beside(self, priority: int, allowance: Allowance) -> None:
        """While a step lies aside: bring those to their first token who are more urgent than
        `priority`, as far as allowed, and streams one token further with each of them. Aborts and
        calls wait until that step is over. Always takes of the allowance."""
        with self._wake:
            self._pauses.forbid()
        steps_before = allowance.steps
        while not allowance.spent and self._take_newcomers():
            self._let_answers_in()
            chunks = self._scheduler.schedule_beside(priority, allowance.tokens)
            if not chunks:
                if allowance.steps == steps_before:
                    allowance.take(0)
                return
            asked = self._asked(chunks)
            allowance.take(asked.shape.tokens)
            started = time.perf_counter()
            self._end_step(self._computation.run(chunks), asked, started)

    def _take_newcomers(self) -> bool:
        """Put in line who has come; False when it is time to stop."""
        with self._wake:
            if self._stopping:
                return False
            submitted, self._submitted = self._submitted, []
        self._cache.settle()
        outputs = [output for request in submitted if (output := self._accept(request))]
        if outputs:
            self._emit(outputs, 0.0, 0, 0)
        return True

    def _wait_for_news(self) -> None:
        """Nothing can run: what is here waits for KV from a lower tier, for pages that a transfer
        holds, or until a batch is made of it. Wait for that, or for anything else that comes in."""
        wait_s = _NEWS_S
        if (next_batch_s := self._scheduler.next_batch_s) is not None:
            self._idle_since = time.monotonic()  # the loop is not stuck, it bides its time
            wait_s = min(wait_s, max(0.0, next_batch_s - self._idle_since))
        with self._wake:
            if self._sequences:
                self._wake.wait_for(self._has_news, wait_s)

    def _has_news(self) -> bool:
        return bool(
            self._submitted
            or self._aborted
            or self._calls
            or self._stopping
            or self._cache.has_mail
        )

    def _move_on(self, computed: Computed) -> EngineOutput | None:
        """Commit the chunk's KV and its token, and end the sequence if that was the last; KV that
        led to bad logits is not kept for others."""
        (chunk, outcome), sequence = computed, computed.chunk.sequence
        chosen = outcome.chosen
        if isinstance(chosen, LogitsNotFinite):
            self._scheduler.distrust(sequence)
        if isinstance(chosen, Exception):
            error = str(chosen) if isinstance(chosen, BadLogits) else type(chosen).__name__
            return self._finish(sequence, FinishReason.ERROR, error=error)
        sequence.prompt_logprobs += outcome.prompt_logprobs
        self._scheduler.commit(chunk)
        if chosen is None:
            return None
        output = self._rules.advance(sequence, chosen)
        if output.finish_reason is not None:
            self._scheduler.remove(sequence)
            del self._sequences[sequence.request.request_id]
        return output

    def _finish(self, sequence: Sequence, reason: FinishReason, *, error: str) -> EngineOutput:
        self._scheduler.remove(sequence)
        self._sequences.pop(sequence.request.request_id, None)
        return last_words(sequence.request.request_id, reason, sequence.cached_tokens, error)

    def _end_all(self) -> list[EngineOutput]:
        """Everything that is still here ends: on `close` as aborts, after a crash as errors."""
        reason = FinishReason.ABORT if self._stopping else FinishReason.ERROR
        error = None if self._stopping else "the engine died"
        ids = [*self._sequences, *(request.request_id for request in self._submitted)]
        for sequence in self._sequences.values():
            try:
                self._scheduler.remove(sequence)
            except Exception:  # noqa: BLE001 - after a crash the books may be wrong; all must hear
                _log.exception("request %s could not be released", sequence.request.request_id)
        self._sequences.clear()
        self._submitted.clear()
        return [last_words(request_id, reason, 0, error) for request_id in ids]

    def _tell_snapshot(self) -> BlockEvents:
        events = self._cache.snapshot()
        self._report([], 0.0, 0, 0, events)
        return events

    def _tell_changes(self) -> None:
        """What the tiers came to hold or lost with no step to tell of it."""
        while self._cache.has_events:
            self._emit([], 0.0, 0, 0)

    def _emit(
        self, outputs: list[EngineOutput], seconds: float, tokens: int, sequences: int
    ) -> None:
        self._report(outputs, seconds, tokens, sequences, self._cache.take_events())

    def _report(
        self,
        outputs: list[EngineOutput],
        seconds: float,
        tokens: int,
        sequences: int,
        events: BlockEvents | None,
        work: StepWork | None = None,
    ) -> None:
        stats = self.stats()
        cost: Coefficients | None = None
        if self._idle_since - self._cost_told_s >= _COST_S:
            self._cost_told_s = self._idle_since
            cost = self._cache.cost.coefficients(
                self._options.step_tokens, self._executor.block_tokens
            )
        self._sink(
            StepReport(tuple(outputs), seconds, tokens, sequences, stats, events, cost, work)
        )
