"""How limits are told to a client: headers, and the 429 of a request that is over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gateway.errors import ApiError, limit_exceeded
from gateway.http_call import Header
from policies.limit_standing import Ceiling, Obstacle, Standing
from policies.pricing import NUSD

DEGRADED_HEADER: Header = (b"x-forebay-limits", b"degraded")

_LONGEST_CLIENT_WAIT_S = 60
"""OpenAI's clients wait no longer than this; told of a longer time, they try again sooner."""

_WHOSE = {
    "tenant": "This key's tenant",
    "key": "This key",
    "model": "This key's tenant, with this model,",
}


def limit_headers(
    ceilings: Sequence[Ceiling], standings: Sequence[Standing], *, degraded: bool
) -> list[Header]:
    """OpenAI's set, of whichever account has least left of requests, and of tokens. A reset is when
    all of it is free again if nothing else comes."""
    requests = [
        (max(0, limits.rpm - standing.requests), limits.rpm, standing)
        for (_, limits), standing in zip(ceilings, standings, strict=True)
        if limits.rpm is not None
    ]
    tokens = [
        (max(0, limits.tpm - standing.tokens), limits.tpm, standing)
        for (_, limits), standing in zip(ceilings, standings, strict=True)
        if limits.tpm is not None
    ]
    headers: list[Header] = []
    for name, counts in (("requests", requests), ("tokens", tokens)):
        if counts:
            remaining, limit, standing = min(counts, key=lambda each: each[:2])
            headers += [
                (f"x-ratelimit-limit-{name}".encode(), str(limit).encode()),
                (f"x-ratelimit-remaining-{name}".encode(), str(remaining).encode()),
                (f"x-ratelimit-reset-{name}".encode(), duration(standing.reset_s).encode()),
            ]
    if degraded and ceilings:
        headers.append(DEGRADED_HEADER)
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes them, rounded up: 12ms, 1s, 6m0s, 1h0m0s."""
    if seconds <= 0:
        return "0s"
    milliseconds = math.ceil(seconds * 1e3 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, whole_s = divmod(-(-milliseconds // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{whole_s}s"
    return f"{minutes}m{whole_s}s" if minutes else f"{whole_s}s"


def refusal(found: Obstacle, headers: Iterable[Header]) -> ApiError:
    """A 429 with the time after which this very request fits if nothing else comes.

    One that never does has no such time; it and those that have to wait longer than clients do are
    told not to be tried again.
    """
    if found.wait_s is None:
        error = ApiError(
            429, _too_much(found), type="rate_limit_error", code="request_exceeds_limit"
        )
        error.headers["x-should-retry"] = "false"
    else:
        wait_s = max(1, math.ceil(found.wait_s))
        error = limit_exceeded(_used_up(found), code=_code(found), retry_after_s=wait_s)
        if wait_s > _LONGEST_CLIENT_WAIT_S:
            error.headers["x-should-retry"] = "false"
    error.headers.update({name.decode(): value.decode() for name, value in headers})
    return error


def _code(found: Obstacle) -> str:
    if found.dimension == "concurrency":
        return "concurrency_limit_exceeded"
    return "budget_exceeded" if found.dimension == "budget" else "rate_limit_exceeded"


def _used_up(found: Obstacle) -> str:
    who = _WHOSE[found.account.scope]
    if found.dimension == "requests":
        return f"{who} has its limit of {found.limit} requests per minute in use."
    if found.dimension == "tokens":
        return (
            f"{who} has a limit of {found.limit} tokens per minute, of which {found.used} are in "
            f"use; this request needs {found.asked}."
        )
    if found.dimension == "concurrency":
        return f"{who} has its limit of {found.limit} requests in flight."
    return (
        f"{who} has a budget of {_usd(found.limit)} per {found.per}, of which {_usd(found.used)} "
        f"is spent or set aside; this request may cost {_usd(found.asked)}."
    )


def _too_much(found: Obstacle) -> str:
    who = _WHOSE[found.account.scope]
    if found.dimension == "budget":
        return (
            f"{who} has a budget of {_usd(found.limit)} per {found.per}; this request alone may "
            f"cost {_usd(found.asked)}. Ask for fewer output tokens."
        )
    return (
        f"{who} has a limit of {found.limit} tokens per minute; this request alone needs "
        f"{found.asked}. Send a shorter prompt or ask for fewer output tokens."
    )


def _usd(nusd: int) -> str:
    return f"${nusd / NUSD:.9f}".rstrip("0").rstrip(".") if nusd % NUSD else f"${nusd // NUSD}"
