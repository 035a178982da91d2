"""When those who wait are let in: at any time, or as whole batches only.

Continuous batching (Orca, Yu et al., 2022) lets a request begin as soon as there is room, whatever
runs. The two ways before it, which are here to be compared with, make a batch of those who wait and
let nobody in until *all* of it has ended. So a short answer keeps its place until the longest one
beside it is through, and who comes meanwhile waits for that too.

`DYNAMIC` makes the batch as soon as `size` wait, or the eldest has waited for `window_s`. `STATIC`
wants whole batches: it should wait for ever until `size` are there, and does wait for a window that
is long (`STATIC_WINDOW_S`) unless another one is asked for, so that the last few are not left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DYNAMIC_WINDOW_S = 0.05
STATIC_WINDOW_S = 10.0


class BatchingMode(StrEnum):
    """How requests come to run together."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True)
class Batching:
    """How batches are made. `size` and `window_s` say nothing if `mode` is `CONTINUOUS`.

    Raises ValueError for a size below 1 and for a window that is negative or not a number.
    """

    mode: BatchingMode = BatchingMode.CONTINUOUS
    size: int = 8
    window_s: float | None = None
    """None: the mode's own."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a batch of {self.size}")
        if self.window_s is not None and not self.window_s >= 0:
            raise ValueError(f"a window of {self.window_s} s")

    @property
    def continuous(self) -> bool:
        """Whether anybody may be let in at any time."""
        return self.mode is BatchingMode.CONTINUOUS

    def admits(self, now_s: float, waiting: int, eldest_s: float, running: int) -> int:
        """How many of those who wait may be let in now.

        `waiting` of them do, the first of whom came at `eldest_s` (which says nothing if there is
        none); `running` are let in and have not ended, those included who have been pushed back
        into the line since.
        """
        if self.continuous:
            return waiting
        if running:
            return 0
        if waiting >= self.size:
            return self.size
        return waiting if waiting and now_s >= self.due_s(eldest_s) else 0

    def next_due_s(self, waiting: int, eldest_s: float, running: int) -> float | None:
        """When `admits` must be asked again though nobody comes or ends; None if it need not be.

        At that time it admits all of them, if nothing else has changed. When `size` wait there is
        no such time: it admits a batch at once.
        """
        if self.continuous or running or not waiting or waiting >= self.size:
            return None
        return self.due_s(eldest_s)

    def due_s(self, eldest_s: float) -> float:
        """When those who wait, the first of whom came at `eldest_s`, are a batch, few or not."""
        if self.window_s is not None:
            return eldest_s + self.window_s
        static = self.mode is BatchingMode.STATIC
        return eldest_s + (STATIC_WINDOW_S if static else DYNAMIC_WINDOW_S)


CONTINUOUS = Batching()
"""What an engine does unless it is asked for something else."""
