"""A server that streams at a steady pace, and says in each token when it was written.

    python -m loadtest.paced_server [--port PORT] [--interval-ms MS] [--groups N]

For measuring a client: the text of a token is the time on the clock of `time.perf_counter` just
before it went out, which on Linux is CLOCK_MONOTONIC, one for all processes of a machine. Every
stream gets a token each interval, `max_tokens` of them, from the next beat of its group on. The
streams of a group get theirs at once, as a batch's do when a step ends; the groups' beats are
spread evenly over the interval. It answers streamed `/v1/completions` only, and knows neither
models nor keys. When it listens it prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from itertools import count

import msgspec
import uvloop

from loadtest.small_server import RequestReader, serve_until_stopped

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_TOKEN = (
    b'data: {"id":"paced","object":"text_completion","created":1700000000,"model":"paced",'
    b'"choices":[{"index":0,"text":"%.6f ","logprobs":null,"finish_reason":%b}],"usage":null}\n\n'
)
_USAGE = (
    b'data: {"id":"paced","object":"text_completion","created":1700000000,"model":"paced",'
    b'"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n'
    b"data: [DONE]\n\n"
)


class _Asked(msgspec.Struct):
    max_tokens: int
    prompt: list[int]


class _Group:
    """Streams that get their tokens together."""

    def __init__(self, first_s: float, interval_s: float) -> None:
        """The first beat is at `first_s` of the loop's clock."""
        self.streams: set[_Stream] = set()
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._next_s = first_s
        self._timer = self._loop.call_at(first_s, self._beat)

    def stop(self) -> None:
        """No more beats."""
        self._timer.cancel()

    def _beat(self) -> None:
        self._next_s += self._interval_s
        self._timer = self._loop.call_at(self._next_s, self._beat)
        for stream in tuple(self.streams):
            stream.write_token()


class _Stream(RequestReader):
    """Answers with the beat of its group."""

    def __init__(self, group: _Group) -> None:
        super().__init__()
        self._group = group
        self._head = b""
        self._prompt_tokens = self._tokens = self._left = 0

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._group.streams.discard(self)

    def answer(self, path: bytes, body: bytes | bytearray) -> None:
        """See `RequestReader.answer`."""
        if path != b"/v1/completions":
            self.write(_NOT_FOUND)
            return
        asked = msgspec.json.decode(body, type=_Asked)
        self._prompt_tokens, self._tokens = len(asked.prompt), asked.max_tokens
        self._left, self._head = asked.max_tokens, _HEAD
        self._group.streams.add(self)

    def write_token(self) -> None:
        """The next token; with the last, what ends the answer."""
        if not self.is_open:
            return
        self._left -= 1
        finish = b"null" if self._left else b'"length"'
        event = _chunk(_TOKEN % (time.perf_counter(), finish))
        if not self._left:
            self._group.streams.discard(self)
            whole = self._prompt_tokens + self._tokens
            event += _chunk(_USAGE % (self._prompt_tokens, self._tokens, whole)) + b"0\r\n\r\n"
        self.write(self._head + event)
        self._head = b""


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(port: int, interval_s: float, groups: int) -> None:
    began_s = asyncio.get_running_loop().time()
    beats = [
        _Group(began_s + (1 + place / groups) * interval_s, interval_s) for place in range(groups)
    ]
    numbers = count()
    try:
        await serve_until_stopped(
            port, lambda: _Stream(beats[next(numbers) % groups]), backlog=4096
        )
    finally:
        for group in beats:
            group.stop()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.paced_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one.")
    parser.add_argument("--interval-ms", type=float, default=400.0)
    parser.add_argument("--groups", type=int, default=400)
    given = parser.parse_args()
    uvloop.run(_serve(given.port, given.interval_ms / 1e3, given.groups))


if __name__ == "__main__":
    main()
