"""What a step's model needs of the device: arithmetic and bytes, from the model's shape alone.

Arithmetic is counted as for model FLOPs utilization (MFU) in PaLM's appendix B (Chowdhery et al.,
2022): two operations per parameter of a matrix and token, and per layer 4 * heads * head_dim for
every position that a token attends to, which is its score and its part of the weighted sum. Bytes,
for model bandwidth utilization (MBU), are those that have to move at least: every matrix once, the
KV that was there before, and the new KV. Divided by a step's seconds and by what the device can do
(`engine.peaks`), that is how near the step came to the least time that it could have taken.

Embeddings that are looked up, norms, rotations and sampling count nothing. Neither does padding,
nor what an executor does twice: what is counted is the model, and not how it is run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from math import prod

from engine.architecture import Architecture
from engine.batching import wants_prompt_logprobs
from engine.report import StepWork
from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.weight_shapes import weight_shapes


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What tokens, logit rows, attended positions and KV of one model amount to.

    Of one token `linear_flops` in the layers' matrices, which have `linear_bytes`; of one row of
    logits `head_flops`, in a matrix of `head_bytes`. Of one position that is attended to, in one
    layer, `attention_flops`; of one token's KV, in one layer, `kv_bytes`. There are `full_layers`
    without a window, and of each window in tokens so many as `windowed_layers` says.
    """

    linear_flops: int
    linear_bytes: int
    head_flops: int
    head_bytes: int
    attention_flops: int
    kv_bytes: int
    full_layers: int
    windowed_layers: tuple[tuple[int, int], ...]
    block_tokens: int

    @classmethod
    def of(cls, architecture: Architecture, itemsize: int, block_tokens: int) -> ModelWork:
        """A model whose weights and KV take `itemsize` bytes per number, in blocks of so many
        tokens."""
        parameters = sum(
            prod(shape)
            for name, shape in weight_shapes(architecture).items()
            if name.startswith("layers.") and len(shape) == 2
        )
        head = architecture.hidden_size * architecture.vocab_size
        windows = Counter(each.window for each in architecture.layers)
        return cls(
            linear_flops=2 * parameters,
            linear_bytes=parameters * itemsize,
            head_flops=2 * head,
            head_bytes=head * itemsize,
            attention_flops=4 * architecture.query_size,
            kv_bytes=2 * architecture.kv_size * itemsize,
            full_layers=windows.pop(None, 0),
            windowed_layers=tuple((w, count) for w, count in windows.items() if w is not None),
            block_tokens=block_tokens,
        )

    def of_step(self, chunks: Ordered[Chunk]) -> StepWork:
        """What these chunks need, to be asked before they are computed.

        What was computed once before and is computed again, as after a preemption, counts again:
        the device has done it. KV that several sequences share counts once: it need not be read
        more often.
        """
        block_tokens = self.block_tokens
        tokens = rows = attended = read = 0
        prefill = False
        first_of: dict[int, Sequence] = {}
        shared: list[tuple[int, int]] = []
        same = 1
        for chunk in chunks:
            sequence, count = chunk.sequence, chunk.tokens
            before = sequence.computed
            tokens += count
            read += before
            if count == 1:
                attended += before + 1
                rows += before + 1 == sequence.known or wants_prompt_logprobs(chunk)
            else:
                prefill = True
                attended += count * before + count * (count + 1) // 2
                if wants_prompt_logprobs(chunk):
                    rows += count
                elif before + count == sequence.known:
                    rows += 1
            if before >= block_tokens:
                first = first_of.setdefault(sequence.pages[0], sequence)
                if first is not sequence:
                    same = _same_blocks(first, sequence, block_tokens, same)
                    longest = max(first.computed, before)
                    shared.append((same * block_tokens, longest))
                    read -= same * block_tokens
        attended *= self.full_layers
        read *= self.full_layers
        for window, layers in self.windowed_layers:
            for chunk in chunks:
                before = chunk.sequence.computed
                after = _attended(before + chunk.tokens, window)
                attended += layers * (after - _attended(before, window))
                read += layers * min(before, window - 1)
            for overlap, longest in shared:
                read -= layers * max(0, overlap - max(0, longest - window + 1))
        written = tokens * (self.full_layers + sum(layers for _, layers in self.windowed_layers))
        return StepWork(
            flops=self.linear_flops * tokens
            + self.head_flops * rows
            + self.attention_flops * attended,
            bytes=self.linear_bytes
            + (self.head_bytes if rows else 0)
            + self.kv_bytes * (read + written),
            prefill=prefill,
        )


def _same_blocks(first: Sequence, other: Sequence, block_tokens: int, guess: int) -> int:
    """How many computed blocks these have in the same pages, from the front on; the first one is
    known to be. Where one block's page is the same, those before it are. A guess of at least 1 that
    is right saves the search: the third sequence behind a prefix has as much of it as the second.
    """
    mine, theirs = first.pages, other.pages
    end = min(first.computed, other.computed) // block_tokens
    reaches = guess <= end and mine[guess - 1] == theirs[guess - 1]
    if reaches and (guess == end or mine[guess] != theirs[guess]):
        return guess
    return bisect_left(range(1, end), True, key=lambda at: mine[at] != theirs[at]) + 1


def _attended(tokens: int, window: int) -> int:
    """What the first `tokens` tokens of a sequence attend to, all together: each sees itself and
    what is before it, `window` positions at most."""
    full = min(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * window
