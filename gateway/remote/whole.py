"""An answer that is not streamed: read whole, checked, and put in our model's name."""

from __future__ import annotations

from typing import NamedTuple

import orjson

from gateway.remote.attempt import Attempt, require_content_type
from gateway.remote.failures import LossKind, UpstreamLost, judge_event
from gateway.remote.usage import Priced, ReportedUsage, is_of_one_choice, read_usage

MAX_ANSWER_BYTES = 64 << 20


class WholeAnswer(NamedTuple):
    """The client's body, and what the server said that it cost."""

    body: bytes
    usage: ReportedUsage | None


async def read_whole(
    attempt: Attempt, model: str, service_tier: str | None = None, priced: Priced | None = None
) -> WholeAnswer:
    """One replica's answer, for a client that is told this `service_tier`, if any, and the price,
    if it wants that. Raises as `Attempt` does, UpstreamLost too for what is no answer."""
    try:
        exchange = await attempt.open()
        require_content_type(exchange, "application/json")
        raw = await exchange.read_all(MAX_ANSWER_BYTES)
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise UpstreamLost(LossKind.GARBAGE, "no JSON") from None
        choices = value.get("choices") if isinstance(value, dict) else None
        if not isinstance(choices, list) or not choices:
            if (error := _error_in(value)) is not None:
                raise judge_event(error, attempt.placement.replica.cleaner)
            raise UpstreamLost(LossKind.GARBAGE, "no answer")
        usage = read_usage(value.get("usage"))
        if usage is not None and len(choices) > 1 and is_of_one_choice(value, usage):
            usage = attempt.estimate_for_all(usage, choices)
        value["model"] = model
        value.pop("service_tier", None)  # the server's own
        if service_tier is not None:
            value["service_tier"] = service_tier
        if usage is not None:
            value["usage"] = usage.wire if priced is None else priced(usage).wire
        try:
            body = orjson.dumps(value)
        except orjson.JSONEncodeError:  # more can be read than written
            raise UpstreamLost(LossKind.GARBAGE, "nested too deep") from None
        attempt.finish(usage)
        return WholeAnswer(body, usage)
    finally:
        attempt.close()


def _error_in(value: object) -> object:
    """The error that a body has in place of an answer, in OpenAI's envelope or without one."""
    if not isinstance(value, dict):
        return None
    return value if value.get("object") == "error" else value.get("error")
