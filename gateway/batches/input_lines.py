"""From a file's parts to its lines."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import NamedTuple

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class InputLine(NamedTuple):
    """A line and its number, from 1. `raw` None: it is longer than allowed, and was passed over."""

    number: int
    raw: bytes | None


async def input_lines(parts: AsyncIterable[bytes], longest_bytes: int) -> AsyncIterator[InputLine]:
    """The lines that are not blank. No more than one part and one line are in memory at a time."""
    number = 0
    line = bytearray()
    too_long = False
    first = True
    async for part in parts:
        start = len(_BYTE_ORDER_MARK) if first and part.startswith(_BYTE_ORDER_MARK) else 0
        first = False
        while (end := part.find(b"\n", start)) >= 0:
            number += 1
            if not too_long:
                line += memoryview(part)[start:end]
            if too_long or len(line) > longest_bytes:
                yield InputLine(number, None)
            elif raw := bytes(line).strip():
                yield InputLine(number, raw)
            line.clear()
            too_long = False
            start = end + 1
        if not too_long:
            line += memoryview(part)[start:]
        if len(line) > longest_bytes:
            too_long = True
            line.clear()
    number += 1
    if too_long:
        yield InputLine(number, None)
    elif raw := bytes(line).strip():
        yield InputLine(number, raw)
