"""Reading a request's body: bounded before and after decompression, never buffered beyond that."""

from __future__ import annotations

import asyncio
import zlib

from starlette.types import Message

from gateway.errors import ApiError, bad_request
from gateway.http_call import ClientDisconnectedError, HttpCall

_IDLE_S = 60.0
_INFLATE_SLICE_BYTES = 256 << 10  # well under a millisecond's work between two turns of the loop
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 47}  # 47: zlib's header, as HTTP says


async def read_body(call: HttpCall, limit_bytes: int) -> bytearray:
    """The decoded body, at most `limit_bytes` long.

    Raises ApiError 413 beyond the limit (before anything is read where Content-Length says so),
    415 for an encoding other than gzip and deflate, 400 for a broken one, 408 when the client
    stalls, and ClientDisconnectedError when it leaves.
    """
    length = call.header("content-length")
    if length is not None and length.isdigit() and int(length) > limit_bytes:
        raise too_large(limit_bytes)
    inflater = _inflater(call.header("content-encoding"), limit_bytes)
    body = bytearray()
    more = True
    while more:
        if call.link is not None and call.link.request_is_whole:
            message = await call.receive()  # nothing to wait for, and a timer would cost as much
        else:
            message = await _received(call)
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        piece = message.get("body", b"")
        more = message.get("more_body", False)
        if inflater is not None:
            await inflater.feed(piece, body)
        else:
            body += piece
        if len(body) > limit_bytes:
            raise too_large(limit_bytes)
    if inflater is not None:
        inflater.finish()
    return body


async def _received(call: HttpCall) -> Message:
    try:
        async with asyncio.timeout(_IDLE_S):
            return await call.receive()
    except TimeoutError:
        raise ApiError(408, "The body did not arrive in time.", code="timeout") from None


def too_large(limit_bytes: int) -> ApiError:
    """413 with the limit."""
    return ApiError(
        413,
        f"The body is larger than the limit of {limit_bytes} bytes.",
        code="request_too_large",
    )


class _Inflater:
    """Incremental gzip or zlib decoding in slices, so that neither memory nor the loop suffers."""

    def __init__(self, window_bits: int, limit_bytes: int) -> None:
        self._window_bits = window_bits
        self._limit_bytes = limit_bytes
        self._stream = zlib.decompressobj(window_bits)
        self._received = 0

    async def feed(self, data: bytes, into: bytearray) -> None:
        """Append what `data` decodes to; stops once `into` is over the limit."""
        self._received += len(data)
        while data and len(into) <= self._limit_bytes:
            if self._stream.eof:  # gzip members may follow one another
                self._stream = zlib.decompressobj(self._window_bits)
            try:
                into += self._stream.decompress(data, _INFLATE_SLICE_BYTES)
            except zlib.error:
                raise _broken() from None
            data = self._stream.unconsumed_tail or self._stream.unused_data
            if data:
                await asyncio.sleep(0)

    def finish(self) -> None:
        """The body has ended; so must the compressed stream have."""
        if self._received and not self._stream.eof:
            raise _broken()


def _inflater(encoding: str | None, limit_bytes: int) -> _Inflater | None:
    name = (encoding or "identity").strip().lower()
    if name in ("identity", ""):
        return None
    bits = _WINDOW_BITS.get(name)
    if bits is None:
        raise ApiError(
            415,
            "This Content-Encoding is not supported; send gzip, deflate, or none.",
            code="unsupported_encoding",
            headers={"accept-encoding": "gzip, deflate"},
        )
    return _Inflater(bits, limit_bytes)


def _broken() -> ApiError:
    return bad_request("The body does not decode under its Content-Encoding.")
