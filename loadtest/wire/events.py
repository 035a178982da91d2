"""Server-sent events, taken out of a body that comes in pieces.

The format: WHATWG HTML, section "Server-sent events".
"""

from __future__ import annotations


class EventSplitter:
    """Finds the events of one body.

    An event ends with an empty line; its `data:` lines are joined by newlines, everything else
    (comments, other fields) is passed over. A last event without its empty line does not count.
    """

    __slots__ = ("_data", "_line")

    def __init__(self) -> None:
        self._line: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece ends, wherever the body was cut."""
        # A line is joined once, at its end: one of megabytes comes in hundreds of pieces.
        self._line.append(piece)
        if b"\n" not in piece:
            return []
        *lines, rest = b"".join(self._line).split(b"\n")
        self._line = [rest] if rest else []
        ended: list[bytes] = []
        for line in lines:
            stripped = line.removesuffix(b"\r")
            if stripped.startswith(b"data:"):
                self._data.append(stripped[5:].removeprefix(b" "))
            elif not stripped and self._data:
                ended.append(b"\n".join(self._data))
                self._data.clear()
        return ended
