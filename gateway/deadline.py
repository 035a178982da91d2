"""A client's own deadline: what is not answered by then is not computed any longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from time import monotonic

from gateway.errors import ApiError
from gateway.terms import TIMEOUT, Terms

_IN_TIME: AbstractAsyncContextManager[None] = nullcontext()


class OutOfTime(Exception):
    """The request's own deadline has passed."""


def in_time(terms: Terms) -> AbstractAsyncContextManager[None]:
    """Raises OutOfTime in the block once the request's deadline has passed."""
    # most requests have none, and a timer costs as much as a token
    return _IN_TIME if terms.timeout_at_s is None else _until(terms.timeout_at_s)


@asynccontextmanager
async def _until(at_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(max(0.0, at_s - monotonic())) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise OutOfTime from None


def out_of_time() -> ApiError:
    """504: not the server's fault, and not worth repeating with the same deadline."""
    return ApiError(
        504,
        f"The answer was not complete within the request's own {TIMEOUT}.",
        type="timeout_error",
        code="deadline_exceeded",
    )
