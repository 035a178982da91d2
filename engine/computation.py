"""From a step's chunks to their tokens: the model's rows, log-probabilities, one draw each."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch

from engine.batching import BatchBuilder, wants_prompt_logprobs
from engine.errors import BadLogits
from engine.executors.base import Executor, PausableExecutor
from engine.request import TokenLogprobs
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import Sampled, Sampler
from engine.sampling.torch_threads import one_torch_thread
from engine.scheduler import Chunk
from engine.sequence import Sequence

_log = logging.getLogger("forebay.engine")


@dataclass(slots=True)
class Outcome:
    """What computing a chunk brought: `chosen` is None where no token was due, and an exception
    where the chunk could not be computed."""

    chosen: Sampled | Exception | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Computed(NamedTuple):
    """A chunk and what came of it."""

    chunk: Chunk
    outcome: Outcome


class _Aside(NamedTuple):
    """A step of so many sequences whose executor has paused, by its chunks and their logit rows,
    less those whose sequences have gone on without it since."""

    rows: dict[Sequence, tuple[Chunk, range]]
    sequences: int

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for chunk, _ in self.rows.values()]


class Computation:
    """Runs steps on an executor. Changes no sequence, so that any step can be run again."""

    def __init__(self, executor: Executor, batches: BatchBuilder, beside: BatchBuilder) -> None:
        """`beside` builds the batches of what runs while a step lies aside, whose own batch must
        stay as it is."""
        self.sampler = Sampler()
        self._executor = executor
        self._batches = batches
        self._batches_beside = beside
        self._aside: _Aside | None = None

    def run(self, chunks: Ordered[Chunk]) -> list[Computed]:
        """Compute the chunks together; if that raises, each alone, so that only the culprit fails.
        KV that a failed attempt wrote is simply written again.

        Whoever is in a step that lies aside has no outcome from that any more.
        """
        if self._aside is not None:
            for chunk in chunks:
                self._aside.rows.pop(chunk.sequence, None)
        try:
            self._clear_opened(chunks)
            builder = self._batches if self._aside is None else self._batches_beside
            batch, ranges = builder.build(chunks)
            return self._outcomes(chunks, ranges, self._executor.forward(batch))
        except Exception as error:  # noqa: BLE001 - one request's fault must not end the others
            return self._each_alone(chunks, error)

    def start(self, chunks: Ordered[Chunk]) -> list[Computed] | None:
        """As `run`, on an executor that can pause; None if it did. Then the step lies aside, and
        `run` computes others meanwhile."""
        assert self._aside is None
        try:
            self._clear_opened(chunks)
            batch, ranges = self._batches.build(chunks)
            logits = cast(PausableExecutor, self._executor).start(batch)
            if logits is None:
                rows = zip(chunks, ranges, strict=True)
                self._aside = _Aside({each[0].sequence: each for each in rows}, len(chunks))
                return None
            return self._outcomes(chunks, ranges, logits)
        except Exception as error:  # noqa: BLE001 - as in `run`
            return self._each_alone(chunks, error)

    def resume(self) -> list[Computed] | None:
        """Go on with the step that lies aside; None if it paused again."""
        aside = self._aside
        assert aside is not None
        try:
            logits = cast(PausableExecutor, self._executor).resume()
            if logits is None:
                return None
            self._aside = None
            ranges = [rows for _, rows in aside.rows.values()]
            return self._outcomes(aside.chunks, ranges, logits)
        except Exception as error:  # noqa: BLE001 - as in `run`
            self._aside = None
            return self._each_alone(aside.chunks, error, of=aside.sequences)

    def _each_alone(
        self, chunks: Ordered[Chunk], error: Exception, *, of: int | None = None
    ) -> list[Computed]:
        """After an attempt at all of them has failed, which was one `of` so many sequences: of more
        than these where some have gone on since. To be called where `error` is handled."""
        if (of or len(chunks)) == 1:
            name = chunks[0].sequence.request.request_id
            _log.exception("request %s failed in its step", name)
            return [Computed(chunks[0], Outcome(error))]
        return [computed for chunk in chunks for computed in self.run([chunk])]

    def _clear_opened(self, chunks: Ordered[Chunk]) -> None:
        """Zero the pages that these chunks begin and do not fill. What a former holder left there
        has no weight in anybody's attention, but is multiplied with that: where the model's numbers
        failed for him, 0 * NaN would make them fail for the next one."""
        block_tokens = self._executor.block_tokens
        with one_torch_thread():
            for chunk in chunks:
                first = chunk.sequence.computed
                block, used = divmod(first + chunk.tokens, block_tokens)
                if used and block * block_tokens >= first:
                    self._executor.pages[chunk.sequence.pages[block]].zero_()

    def _outcomes(
        self, chunks: Ordered[Chunk], ranges: Ordered[range], logits: torch.Tensor
    ) -> list[Computed]:
        """Take prompt log-probabilities, choose one token per finished chunk."""
        outcomes = [Outcome() for _ in chunks]
        sampling: list[int] = []
        rows: list[int] = []
        for index, (chunk, logit_rows) in enumerate(zip(chunks, ranges, strict=True)):
            if wants_prompt_logprobs(chunk):
                try:
                    outcomes[index].prompt_logprobs = _prompt_logprobs(
                        chunk, logits[logit_rows.start : logit_rows.stop]
                    )
                except BadLogits as bad:
                    outcomes[index].chosen = bad
                    continue
            if chunk.reaches_end:
                sampling.append(index)
                rows.append(logit_rows.stop - 1)
        if len(rows) != logits.shape[0]:
            logits = logits[rows]
        drawn = self.sampler.sample(logits, [chunks[index].sequence.row for index in sampling])
        for index, chosen in zip(sampling, drawn, strict=True):
            outcomes[index].chosen = chosen
        return [Computed(*each) for each in zip(chunks, outcomes, strict=True)]


def _prompt_logprobs(chunk: Chunk, logits: torch.Tensor) -> list[TokenLogprobs]:
    """Rows predict the next prompt token; the last prompt row predicts the first new one.

    Raises BadLogits for rows that are not finite.
    """
    sequence = chunk.sequence
    last = min(sequence.computed + chunk.tokens, sequence.prompt_tokens - 1)
    rows = last - sequence.computed
    if rows < 1:
        return []
    targets = torch.from_numpy(sequence.token_ids(sequence.computed + 1, last + 1))
    return prompt_logprobs(logits[:rows], targets, sequence.request.params.prompt_logprobs or 0)
