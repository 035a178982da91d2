"""More traffic than a trace has: copies of it laid over each other."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import overload

import numpy as np

from loadtest.trace import Trace, TraceRequest

_MOST_LATE_S = 60.0


def overlaid(trace: Trace, copies: int, *, seed: int = 0) -> Trace:
    """`copies` of the trace at the same time, each by up to a minute later, and each with blocks of
    its own: as many times the traffic, with as much to be found in a cache. Requests are made when
    they are asked for. Raises ValueError for less than one copy."""
    if copies < 1:
        raise ValueError(f"there must be at least one copy, not {copies}")
    return Trace(
        f"{copies} × {trace.name}",
        trace.block_tokens,
        _Overlaid(trace.requests, copies, Random(seed)),
        trace.tenants,
    )


class _Overlaid(Sequence[TraceRequest]):
    def __init__(self, requests: Sequence[TraceRequest], copies: int, random: Random) -> None:
        self._requests = requests
        self._late_s = [random.uniform(0.0, _MOST_LATE_S) for _ in range(copies)]
        self._blocks = 1 + max((max(each.blocks, default=-1) for each in requests), default=-1)
        at_s = np.array([each.at_s for each in requests])
        all_s = (np.array(self._late_s)[:, None] + at_s).ravel()
        self._order = np.argsort(all_s, kind="stable").astype(np.int32)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, at: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[TraceRequest]: ...
    def __getitem__(self, at: int | slice) -> TraceRequest | Sequence[TraceRequest]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        copy, number = divmod(int(self._order[at]), len(self._requests))
        request = self._requests[number]
        first = copy * self._blocks
        return request._replace(
            at_s=request.at_s + self._late_s[copy],
            blocks=[first + block for block in request.blocks],
        )
