"""Messages as bytes on a stream: four bytes of length (little-endian), then msgpack."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from gateway.replicas.worker.messages import FromWorker, ToWorker

MAX_FRAME_BYTES = 1 << 28
"""Far above what can be meant: a list of the blocks in a terabyte of KV is a tenth of it."""

_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()

MessageT = TypeVar("MessageT")


class BadFrame(Exception):
    """What came is not a frame of ours; nothing behind it can be understood."""


def to_frame(message: ToWorker | FromWorker) -> bytearray:
    """The message with its length in front. Any thread.

    Raises BadFrame for one that is too long, TypeError or OverflowError for values that no message
    can hold.
    """
    frame = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, frame, _LENGTH_BYTES)
    length = len(frame) - _LENGTH_BYTES
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {length} bytes is longer than any frame")
    frame[:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "little")
    return frame


class FrameReader(Generic[MessageT]):
    """Puts messages together from whatever pieces a stream comes in."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """The messages that are complete now, in order. Raises BadFrame, and is not to be fed any
        more then; no text of the frame is in the error."""
        self._buffer += data
        messages: list[MessageT] = []
        start, end = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while end - start >= _LENGTH_BYTES:
                body = start + _LENGTH_BYTES
                length = int.from_bytes(view[start:body], "little")
                if length > MAX_FRAME_BYTES:
                    raise BadFrame(f"a frame claims to be {length} bytes long")
                if end - body < length:
                    break
                start = body + length
                messages.append(self._decode(view[body:start]))
        del self._buffer[:start]
        return messages

    def _decode(self, frame: memoryview) -> MessageT:
        with frame:
            try:
                return self._decoder.decode(frame)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                problem = f"a frame of {len(frame)} bytes is no message: {type(error).__name__}"
            # outside the handler: its error could quote what came
            raise BadFrame(problem)


def from_worker() -> FrameReader[FromWorker]:
    """Reads what a worker says."""
    return FrameReader(msgspec.msgpack.Decoder(FromWorker))


def to_worker() -> FrameReader[ToWorker]:
    """Reads what a gateway says."""
    return FrameReader(msgspec.msgpack.Decoder(ToWorker))
