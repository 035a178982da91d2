"""What a request cost, said in its answer where the client asks for it.

With the request header `x-forebay-price: include` an answer's `usage` has a member `cost_usd`, an
exact decimal number as a string; a streamed answer has it in the chunk of its usage, so that it
needs `stream_options: {"include_usage": true}` too. Answers that are not streamed say it in the
header `x-forebay-cost-usd` as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.http_call import Header, HttpCall
from gateway.included import is_asked_for
from policies.pricing import usd_text

ASKED = "x-forebay-price"
_COST = b"x-forebay-cost-usd"


def wants_price(call: HttpCall) -> bool:
    """Whether the client asks what its request costs. Raises a 400 ApiError for what is no such
    question."""
    return is_asked_for(call, ASKED)


def priced_usage(usage: Mapping[str, object], cost_nusd: int) -> dict[str, object]:
    """A usage object with what it cost."""
    return {**usage, "cost_usd": usd_text(cost_nusd)}


def cost_header(cost_nusd: int) -> Header:
    """For an answer that is not streamed."""
    return _COST, usd_text(cost_nusd).encode()
