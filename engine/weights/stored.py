"""Weights as they are stored, and the one way to read them: chunks of rows, a few threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from math import prod

import torch

from engine.hardware import physical_cores
from engine.model import Progress
from engine.weights.shapes import is_norm

# One chunk's float32 temporaries are a few megabytes: they stay near the cache, and no weight ever
# exists whole in float32 unless float32 was asked for.
_CHUNK_ELEMENTS = 1 << 19
_MAX_READERS = 4  # beyond that, memory bandwidth is the limit


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight in a checkpoint.

    `read(start, stop)` gives rows of the last dimension as [stop - start, columns], in any float
    dtype, from any thread. A vector has one row. `order` says where each stored element of the
    first dimension belongs (None: where it stands), int64 [shape[0]]. `offset` is added in float32
    (Gemma stores its norms as weight - 1).
    """

    own_name: str
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]
    order: torch.Tensor | None = None
    offset: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the last dimension."""
        return prod(self.shape[:-1])

    def chunks(self) -> list[tuple[int, int]]:
        """Row ranges [start, stop) of about `_CHUNK_ELEMENTS` that cover the weight."""
        step = max(1, _CHUNK_ELEMENTS // self.shape[-1])
        return [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]

    def fill(self, out: torch.Tensor, start: int, stop: int) -> None:
        """Read rows [start, stop) into their places in `out`, which has this weight's shape."""
        rows = self.read(start, stop)
        if self.offset:
            rows = rows.float() + self.offset
        rows = rows.to(out.dtype)
        if len(self.shape) == 1:
            out[slice(None) if self.order is None else self.order] = rows[0]
        elif self.order is None:
            out[start:stop] = rows
        else:
            out[self.order[start:stop]] = rows


def read_weights(
    stored: Mapping[str, StoredWeight], dtype: torch.dtype, progress: Progress | None
) -> dict[str, torch.Tensor]:
    """Read everything into CPU tensors of `dtype` (norms float32), by canonical name.

    `progress` is called on the caller's thread. The first error stops the readers and is raised.
    """
    weights = {
        name: torch.empty(weight.shape, dtype=torch.float32 if is_norm(name) else dtype)
        for name, weight in stored.items()
    }
    done, total = 0, sum(tensor.nbytes for tensor in weights.values())
    with ThreadPoolExecutor(min(_MAX_READERS, physical_cores()), "load-weights") as readers:
        pending = {
            readers.submit(weight.fill, weights[name], start, stop): (
                weights[name].nbytes * (stop - start) // weight.rows
            )
            for name, weight in stored.items()
            for start, stop in weight.chunks()
        }
        try:
            for chunk in as_completed(pending):
                chunk.result()
                done += pending[chunk]
                if progress:
                    progress("weights", done, total)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    return weights
