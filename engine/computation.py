"""From a step's chunks to their tokens: the model's rows, log-probabilities, one draw each."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.batching import BatchBuilder, wants_prompt_logprobs
from engine.errors import BadLogits
from engine.executors.base import Executor
from engine.request import TokenLogprobs
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import Sampled, Sampler
from engine.scheduler import Chunk

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


class Computation:
    """Runs steps on an executor. Changes no sequence, so that any step can be run again."""

    def __init__(self, executor: Executor, batches: BatchBuilder) -> None:
        self.sampler = Sampler()
        self._executor = executor
        self._batches = batches

    def run(self, chunks: Ordered[Chunk]) -> list[Computed]:
        """Compute the chunks together; if that raises, each alone, so that only the culprit fails.
        KV that a failed attempt wrote is simply written again."""
        try:
            outcomes = self._compute(chunks)
        except Exception as error:  # noqa: BLE001 - one request's fault must not end the others
            if len(chunks) == 1:
                name = chunks[0].sequence.request.request_id
                _log.exception("request %s failed in its step", name)
                return [Computed(chunks[0], Outcome(error))]
            return [computed for chunk in chunks for computed in self.run([chunk])]
        return [Computed(*each) for each in zip(chunks, outcomes, strict=True)]

    def _compute(self, chunks: Ordered[Chunk]) -> list[Outcome]:
        """Run the model, take prompt log-probabilities, choose one token per finished chunk."""
        batch, ranges = self._batches.build(chunks)
        logits = self._executor.forward(batch)
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
        return outcomes


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
