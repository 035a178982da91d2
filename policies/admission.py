"""Whether a request is let in now: what it would wait for, against what was promised and allowed.

Everything is a time in seconds from the cost model. Queues are bounded by work, which is time, and
not by how many stand in them; whoever is refused is told when there would have been room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from policies.cost import Coefficients
from policies.routing import Prediction, Standing
from policies.slo import OnOverload

SURE = 0.75
"""A first token counts as in time that is predicted within so much of the time there is: what is
predicted for the last moment comes too late every other time. The queue that is not let in then
would make nothing faster: it only has to be long enough not to run empty."""
_PATIENCE = 0.25
"""A prompt that takes longer than was promised when nothing else runs, to read it, to compute it,
is no overload. It is let in where it waits for no longer than this part of what was promised."""
_LATE = 0.5
"""Whoever has waited until it is late runs when the queue is shorter than this part of what was
promised: the rest of it is for those who can be in time."""
LONGEST_RETRY_S = 60
_UNKNOWN_ANSWER_TOKENS = 64


class Verdict(StrEnum):
    """What becomes of a request."""

    ADMIT = "admit"
    QUEUE = "queue"
    DOWNGRADE = "downgrade"
    SHED = "shed"


Reason = Literal["", "slo", "timeout", "work", "places"]
"""Why it is not let in: the first token would come later than was promised, or than its client
waits; too much work is in front of it; or every place that its class may take is taken."""


class Ruling(NamedTuple):
    """`retry_after_s` is a whole number, and 0 for what is let in."""

    verdict: Verdict
    reason: Reason = ""
    retry_after_s: int = 0


ADMITTED = Ruling(Verdict.ADMIT)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request needs. `ttft_s` was promised, and `timeout_s` is how long its client waits,
    both counted from when it came, `elapsed_s` ago; None: no such thing. `max_queue_s` is the most
    work that may be in front of it, whatever was promised. `on_overload` is what its tenant wants
    done where it cannot be in time."""

    ttft_s: float | None
    timeout_s: float | None
    elapsed_s: float
    max_queue_s: float
    on_overload: OnOverload


def judge(prediction: Prediction, wish: Wish) -> Ruling:
    """One who has just come, of whom this is predicted.

    Who would get nothing before its client has left, or has more work in front than anybody may
    have, is refused whatever its tenant wants. The others are let in if they are in time.
    """
    if (refused := _refused(prediction, wish)) is not None:
        return refused
    late_s = _late_s(prediction, wish, wish.elapsed_s)
    if late_s <= 0:
        return ADMITTED
    # who comes again has its time before it once more
    retry_after_s = _whole(_late_s(prediction, wish, 0.0))
    return _overload(wish, "slo", retry_after_s)


def judge_waiting(prediction: Prediction, wish: Wish) -> Ruling:
    """One who has been told to QUEUE, and may have become late meanwhile. SHED if there is no
    point any more, QUEUE if it has to wait further."""
    alone_s = prediction.load_s + prediction.prefill_s
    if wish.timeout_s is not None and wish.elapsed_s + alone_s > wish.timeout_s:
        return Ruling(Verdict.SHED, "timeout", _whole(prediction.queue_s))
    if wish.ttft_s is None or prediction.queue_s <= _LATE * wish.ttft_s:
        return ADMITTED
    late_s = _late_s(prediction, wish, wish.elapsed_s)
    if late_s <= 0:
        return ADMITTED
    return Ruling(Verdict.QUEUE, "slo", _whole(_late_s(prediction, wish, 0.0)))


def judge_full(wish: Wish, until_place_s: float) -> Ruling:
    """One for whom every place is taken; one may be free in so much time."""
    return _overload(wish, "places", _whole(until_place_s))


def until_place_s(standing: Standing, cost: Coefficients, places: float) -> float:
    """When fewer than `places` sequences will be at a replica, if nobody else comes: those who run
    are spread evenly over their answers."""
    over = standing.running + standing.waiting - places + 1
    if over <= 0:
        return 0.0
    running = max(1, standing.running)
    step_s = cost.decode_step_s(running, standing.context_tokens // running)
    return over * (standing.answer_tokens or _UNKNOWN_ANSWER_TOKENS) * step_s / running


def _refused(prediction: Prediction, wish: Wish) -> Ruling | None:
    ttft_s = prediction.ttft_s
    if wish.timeout_s is not None and wish.elapsed_s + ttft_s > wish.timeout_s:
        return Ruling(Verdict.SHED, "timeout", _whole(ttft_s - wish.timeout_s))
    if prediction.queue_s > wish.max_queue_s:
        return Ruling(Verdict.SHED, "work", _whole(prediction.queue_s - wish.max_queue_s))
    return None


def _late_s(prediction: Prediction, wish: Wish, elapsed_s: float) -> float:
    """How much too late its first token would be, if it had come so long ago; or by how much more
    than it may anyway is in front of it, if that is less."""
    if wish.ttft_s is None:
        return 0.0
    alone_s = prediction.load_s + prediction.prefill_s
    too_late_s = elapsed_s + alone_s + prediction.queue_s - SURE * wish.ttft_s
    return min(too_late_s, prediction.queue_s - _PATIENCE * wish.ttft_s)


def _overload(wish: Wish, reason: Reason, retry_after_s: int) -> Ruling:
    verdict = {
        "reject": Verdict.SHED,
        "queue": Verdict.QUEUE,
        "downgrade": Verdict.DOWNGRADE,
    }[wish.on_overload]
    return Ruling(verdict, reason, retry_after_s)


def _whole(seconds: float) -> int:
    """What `Retry-After` says: work in front goes by as time does, if nobody else comes."""
    return max(1, min(LONGEST_RETRY_S, math.ceil(min(seconds, LONGEST_RETRY_S))))
