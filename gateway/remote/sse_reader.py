"""Server-sent events as they arrive, cut anywhere.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from gateway.remote.failures import answer_too_long

MAX_EVENT_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


class SseReader:
    """Bytes in, the data of whole events out.

    Lines end with LF, CRLF or CR; comments, names, ids and retry times are passed over. A line of
    llama.cpp's own field `error` is data too, in OpenAI's envelope.
    """

    __slots__ = ("_after_cr", "_data", "_data_bytes", "_limit_bytes", "_rest", "_started")

    def __init__(self, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._after_cr = False
        self._started = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in this piece. Raises a 502 ApiError for a line, or
        an event, of more than the limit."""
        if not self._started:
            if len(self._rest) + len(piece) < len(_BOM):
                self._rest += piece
                return []
            self._started = True
            piece = (self._rest + piece).removeprefix(_BOM)
            self._rest = b""
        if self._after_cr or b"\r" in piece:
            piece = self._with_line_feeds(piece)
        if not self._rest and not self._data and piece.endswith(b"\n\n"):
            plain = _plain_events(piece)
            if plain is not None:
                return plain
        lines = piece.split(b"\n")
        if self._rest:
            lines[0] = self._rest + lines[0]
        self._rest = lines.pop()
        if len(self._rest) > self._limit_bytes:
            raise answer_too_long()
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._add(line[6:] if line[5:6] == b" " else line[5:])
            elif not line:
                if self._data:
                    whole = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                    events.append(whole)
                    self._data.clear()
                    self._data_bytes = 0
            elif line.startswith(b"error:"):
                self._add(b'{"error":%b}' % line[6:].strip())
        return events

    def _add(self, value: bytes) -> None:
        self._data.append(value)
        self._data_bytes += len(value) + 1
        if self._data_bytes > self._limit_bytes:
            raise answer_too_long()

    def _with_line_feeds(self, piece: bytes) -> bytes:
        """The piece with every line's end as LF. A CR at its end is one already; the LF that may
        follow in the next piece is not another."""
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._after_cr = False
        if piece:
            self._after_cr = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _plain_events(piece: bytes) -> list[bytes] | None:
    """The data of a piece that is nothing but whole events of one line of data each, as most are;
    None for any other."""
    if not piece.startswith(b"data: "):
        return None
    events = piece[6:-2].split(b"\n\ndata: ")
    return events if piece.count(b"\n") == 2 * len(events) else None
