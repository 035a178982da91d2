"""From the scheduler's chunks to the flat arrays an executor reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.executors.base import StepBatch
from engine.scheduler import Chunk
from policies.cost import StepShape


class BatchBuilder:
    """Assembles `StepBatch`es in buffers that are reused from step to step.

    A batch is valid until the next `build`. Rows of the block table belong to scheduler slots, so
    a decode step only writes the entries that are new.
    """

    def __init__(
        self, *, max_running: int, max_context: int, max_blocks: int, step_tokens: int
    ) -> None:
        """A sequence has at most `max_context` tokens, in at most `max_blocks` blocks."""
        self._token_ids = np.zeros(step_tokens, dtype=np.int32)
        self._positions = np.zeros(step_tokens, dtype=np.int32)
        self._tables = np.zeros((max_running, max_blocks), dtype=np.int32)
        self._counting = np.arange(max_context, dtype=np.int32)
        self._filled: list[list[int] | None] = [None] * max_running
        self._filled_count = [0] * max_running

    def build(self, chunks: Sequence[Chunk]) -> tuple[StepBatch, list[range]]:
        """The batch of these chunks, and for each chunk the range of its rows in `logit_rows`.

        A chunk that reaches its sequence's end asks for its last row's logits, one whose prompt
        log-probabilities are wanted asks for every row's, others for none.
        """
        starts, contexts, slots, logit_rows = [0], [], [], list[int]()
        ranges: list[range] = []
        longest = 1
        end = 0
        for chunk in chunks:
            sequence, start = chunk.sequence, end
            first, last = sequence.computed, sequence.computed + chunk.tokens
            end = start + chunk.tokens
            self._token_ids[start:end] = sequence.token_ids(first, last)
            self._positions[start:end] = self._counting[first:last]
            starts.append(end)
            contexts.append(last)
            assert sequence.slot is not None
            slots.append(sequence.slot)
            self._fill_table(sequence.slot, sequence.pages)
            longest = max(longest, len(sequence.pages))
            before = len(logit_rows)
            if wants_prompt_logprobs(chunk):
                logit_rows.extend(range(start, end))
            elif chunk.reaches_end:
                logit_rows.append(end - 1)
            ranges.append(range(before, len(logit_rows)))
        batch = StepBatch(
            token_ids=self._token_ids[:end],
            positions=self._positions[:end],
            query_starts=np.asarray(starts, dtype=np.int32),
            context_lengths=np.asarray(contexts, dtype=np.int32),
            block_tables=self._tables[slots, :longest],
            logit_rows=np.asarray(logit_rows, dtype=np.int32),
        )
        return batch, ranges

    def _fill_table(self, slot: int, pages: list[int]) -> None:
        # a slot's list object changes when the slot changes hands or its sequence was preempted
        known = self._filled_count[slot] if self._filled[slot] is pages else 0
        if known != len(pages):
            self._tables[slot, known : len(pages)] = pages[known:]
            self._filled[slot] = pages
            self._filled_count[slot] = len(pages)


def wants_prompt_logprobs(chunk: Chunk) -> bool:
    """Whether the chunk's rows are prompt rows whose logits the request asked for."""
    sequence = chunk.sequence
    return (
        sequence.request.params.prompt_logprobs is not None
        and not sequence.generated
        and sequence.computed < sequence.prompt_tokens
    )


def step_shape(chunks: Sequence[Chunk]) -> StepShape:
    """What the cost model needs to know of a step."""
    tokens = attended = context_read = 0
    for chunk in chunks:
        count, before = chunk.tokens, chunk.sequence.computed
        tokens += count
        attended += count * before + count * (count + 1) // 2
        context_read += before + count
    return StepShape(tokens, len(chunks), attended, context_read)
