"""The same traffic, faster or slower, shorter, and no longer than a model can take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

from loadtest.trace import Trace, TraceRequest

TooLong = Literal["drop", "cut"]


@dataclass(frozen=True, slots=True)
class Scale:
    """What to do to a trace, in this order.

    - `spread`: requests with one and the same time are laid out evenly until the next time in the
      trace. For traces whose clock is coarse: Mooncake's ticks every 3 s.
    - `speed`: 2 is twice as fast, half the time between arrivals.
    - `requests`, `seconds`: no more than the first so many, and those of the first so many seconds
      at the new speed.
    - `length`: prompts and blocks are so many times as long, so that the same share of each prompt
      is shared. Blocks keep a whole number of tokens, which settles the exact factor: 1/32 makes
      blocks of 512 to 16, 1/30 to 17 and all prompts by 17/512. A server shares whole blocks of
      its own size (16 in forebay): multiples of it keep sharing as it was. Without blocks, the
      factor is exact. `output_length` is the answers' own factor; None: as the prompts'. No
      prompt and no answer becomes shorter than one token.
    - `longest_tokens`: what prompt and answer may have together. A request that has more is
      dropped, or its prompt is cut at the end, to whole blocks if it has any; one that does not
      fit then either is dropped all the same.

    Raises ValueError for factors and limits that are not positive.
    """

    speed: float = 1.0
    length: float = 1.0
    output_length: float | None = None
    requests: int | None = None
    seconds: float | None = None
    longest_tokens: int | None = None
    too_long: TooLong = "drop"
    spread: bool = False

    def __post_init__(self) -> None:
        for name in ("speed", "length", "output_length", "requests", "seconds", "longest_tokens"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be more than 0, not {value}")


class Scaled(NamedTuple):
    """A trace to scale, and how many requests were dropped or cut for being too long."""

    trace: Trace
    dropped: int = 0
    cut: int = 0


def scaled(trace: Trace, scale: Scale) -> Scaled:
    """The trace to scale; the same for the same arguments."""
    requests = _spread(trace.requests) if scale.spread else list(trace.requests)
    requests = [request._replace(at_s=request.at_s / scale.speed) for request in requests]
    if scale.seconds is not None:
        requests = [request for request in requests if request.at_s < scale.seconds]
    requests = requests[: scale.requests]
    block_tokens = trace.block_tokens
    if any(request.blocks for request in requests):
        block_tokens = max(1, round(trace.block_tokens * scale.length))
        factor = block_tokens / trace.block_tokens
    else:
        factor = scale.length
    output = factor if scale.output_length is None else scale.output_length
    lengths = _Lengths(trace.block_tokens, block_tokens, factor, output)
    fitted = [
        _fitted(lengths.of(request), block_tokens, scale.longest_tokens, scale.too_long)
        for request in requests
    ]
    kept = [fit.request for fit in fitted if fit.request is not None]
    return Scaled(
        replace(trace, block_tokens=block_tokens, requests=kept),
        dropped=len(fitted) - len(kept),
        cut=sum(fit.cut for fit in fitted),
    )


class _Lengths(NamedTuple):
    """`prompt` is the factor of blocks, exactly, where there are any."""

    old_block: int
    new_block: int
    prompt: float
    output: float

    def of(self, request: TraceRequest) -> TraceRequest:
        """As long as it is to be, with the same blocks."""
        return request._replace(
            prompt_tokens=self._prompt_tokens(request),
            output_tokens=request.output_tokens
            and max(1, round(request.output_tokens * self.output)),
        )

    def _prompt_tokens(self, request: TraceRequest) -> int:
        if not request.blocks:
            return max(1, round(request.prompt_tokens * self.prompt))
        # Block by block, so that the prompt still ends in its last block.
        whole, rest = divmod(request.prompt_tokens, self.old_block)
        tail = max(1, round(rest * self.prompt)) if rest else 0
        return whole * self.new_block + tail


class _Fit(NamedTuple):
    request: TraceRequest | None
    cut: bool = False


def _fitted(
    request: TraceRequest, block_tokens: int, longest_tokens: int | None, too_long: TooLong
) -> _Fit:
    if longest_tokens is None or request.prompt_tokens + request.output_tokens <= longest_tokens:
        return _Fit(request)
    room = longest_tokens - request.output_tokens
    if request.blocks:
        # What would be left of a cut block is the beginning of it, and so another block.
        room -= room % block_tokens
    if too_long == "drop" or room < 1:
        return _Fit(None)
    blocks = request.blocks[: room // block_tokens]
    return _Fit(request._replace(prompt_tokens=room, blocks=blocks), cut=True)


def _spread(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The last group, behind which no time is known, is laid out over as long as the one before."""
    return list(_laid_out([list(group) for _, group in groupby(requests, _at_s)]))


def _laid_out(groups: Sequence[Sequence[TraceRequest]]) -> Iterator[TraceRequest]:
    span_s = 0.0
    for place, group in enumerate(groups):
        at_s = group[0].at_s
        if place + 1 < len(groups):
            span_s = groups[place + 1][0].at_s - at_s
        for index, request in enumerate(group):
            yield request._replace(at_s=at_s + span_s * index / len(group))


def _at_s(request: TraceRequest) -> float:
    return request.at_s
