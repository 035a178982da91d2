"""Traffic as a sequence of lengths and blocks: what traces hold, and what the simulator is fed.

A prompt is a chain of blocks. Two prompts share the leading blocks whose ids are equal: an id
stands for a block and everything before it, as a chained hash does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loadtest.plan import SOLE_TENANT, TenantPlan


class TraceRequest(NamedTuple):
    """One request: when it came, in seconds from the beginning, how long its prompt and its answer
    were, and the ids of its prompt's blocks (the last may be only partly filled; it is in `blocks`
    all the same). Without ids, nothing is shared. `tenant` is whose it was."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    tenant: str = SOLE_TENANT


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival; `block_tokens` is what a whole block has."""

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    tenants: tuple[TenantPlan, ...] = (TenantPlan(),)
