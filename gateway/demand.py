"""What a request is going to use, before it runs, and what that was once it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gateway.dispatch.prefix import Prefix
from gateway.tenants import Tenant
from gateway.wire.usage import Usage
from policies.limits import Demand
from policies.pricing import Price, written_tokens
from policies.routing import RouteRequest

_USUAL_ANSWER_TOKENS = 256
_LEAST_ANSWER_TOKENS = 64
_ROOM_FACTOR = 2
"""Of answers whose length the client has left open: so much longer than usual they may become."""


_MOST = 1 << 53
"""More than any limit, and what every counter still holds exactly."""


class Ask(NamedTuple):
    """One of a request's prompts: how routing sees it, and of how many `choices` each answer is.
    `says_length` is whether the client has said how long an answer may be at most; `kept_tokens`
    is the longest beginning that it asks to keep."""

    route: RouteRequest
    prefix: Prefix
    choices: int = 1
    says_length: bool = True
    kept_tokens: int = 0


def demand_of(
    asks: Sequence[Ask],
    cached_tokens: Sequence[int],
    tenant: Tenant,
    price: Price,
    *,
    usual_answer_tokens: int = 0,
    batch: bool = False,
) -> Demand:
    """`cached_tokens` are what each prompt is expected to find in a cache; `usual_answer_tokens` is
    how long answers are on average (0: not known)."""
    usual = max(_LEAST_ANSWER_TOKENS, _ROOM_FACTOR * (usual_answer_tokens or _USUAL_ANSWER_TOKENS))
    output = wanted_output = uncached = cached = written = 0
    for ask, found in zip(asks, cached_tokens, strict=True):
        tokens = ask.route.prompt_tokens
        found = min(found, tokens - 1) if tokens else 0
        uncached += tokens - found
        cached += found
        written += written_tokens(tokens, found, ask.kept_tokens)
        longest = ask.route.max_tokens
        output += ask.choices * (longest if ask.says_length else 1)
        wanted_output += ask.choices * (longest if ask.says_length else min(longest, usual))
    prompts = weighted_tokens(uncached, cached, tenant)
    cost_of = {
        tokens: price.request_nusd(
            uncached_tokens=uncached,
            cached_tokens=cached,
            output_tokens=tokens,
            written_tokens=written,
            batch=batch,
        )
        for tokens in {output, wanted_output}
    }
    return Demand(
        tokens=min(_MOST, prompts + output),
        wanted_tokens=min(_MOST, prompts + wanted_output),
        cost_nusd=min(_MOST, cost_of[output]),
        wanted_cost_nusd=min(_MOST, cost_of[wanted_output]),
    )


def used_tokens(usage: Usage, tenant: Tenant) -> int:
    """As limits count them."""
    cached = usage.cached_tokens
    return weighted_tokens(usage.prompt_tokens - cached, cached, tenant) + usage.completion_tokens


def weighted_tokens(uncached: int, cached: int, tenant: Tenant) -> int:
    """Prompt tokens, of which cached ones count less."""
    return uncached + math.ceil(cached * tenant.cached_weight)
