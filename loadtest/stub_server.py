"""An upstream that answers at once, so that what stands in front of it can be measured.

    python -m loadtest.stub_server [--port PORT]

It speaks just enough of OpenAI's API: `/v1/models`, and chat and text completions whose answer has
as many tokens as `max_tokens` says, or `max_completion_tokens`, into which some routers turn it;
and `/health`, which they ask before they send anything. A streamed answer is written event by
event, each a write of its own to the network, the head with the first one and what closes the
stream with the last one: `max_tokens: 16` are 16 writes. When it listens it prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import uvloop

from loadtest.small_server import RequestReader, serve_until_stopped

WORD = "token "
"""The text of each token."""
PROMPT_TOKENS = 100
"""What every prompt is said to have."""
_MOST_TOKENS = 4096
_CREATED = 1_700_000_000
_ID = "stub-0123456789abcdef"


class _Stub(RequestReader):
    """Answers at once."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()

    def answer(self, path: bytes, body: bytes | bytearray) -> None:
        """See `RequestReader.answer`."""
        if path == b"/v1/models":
            self.write(_whole(200, {"object": "list", "data": [{"id": "stub", "object": "model"}]}))
            return
        if path == b"/health":
            self.write(_whole(200, {}))
            return
        chat = path == b"/v1/chat/completions"
        if not chat and path != b"/v1/completions":
            self.write(_whole(404, {"error": {"message": "There is nothing at this path."}}))
            return
        request: dict[str, Any] = orjson.loads(body)
        wanted = request.get("max_tokens") or request.get("max_completion_tokens") or 16
        tokens = min(int(wanted), _MOST_TOKENS)
        if request.get("stream"):
            self._write_next(_streamed(request, tokens, chat=chat))
        else:
            self.write(_whole(200, _answer(request, tokens, chat=chat)))

    def _write_next(self, pieces: Iterator[bytes]) -> None:
        """One piece for each turn of the loop: what is written in one turn goes out as one."""
        piece = next(pieces, None)
        if piece is not None and self.is_open:
            self.write(piece)
            self._loop.call_soon(self._write_next, pieces)


def _head(request: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": _ID, "object": kind, "created": _CREATED, "model": request.get("model")}


def _usage(tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _answer(request: dict[str, Any], tokens: int, *, chat: bool) -> dict[str, Any]:
    text = WORD * tokens
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {
        **_head(request, "chat.completion" if chat else "text_completion"),
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "length"}],
        "usage": _usage(tokens),
    }


def _streamed(request: dict[str, Any], tokens: int, *, chat: bool) -> Iterator[bytes]:
    """The pieces of a streamed answer, one for each token."""
    head = _head(request, "chat.completion.chunk" if chat else "text_completion")
    options = request.get("stream_options") or {}
    text: dict[str, Any] = {"delta": {"content": WORD}} if chat else {"text": WORD}
    middle = _chunk({**head, "choices": [{"index": 0, **text, "finish_reason": None}]})
    last = _chunk({**head, "choices": [{"index": 0, **text, "finish_reason": "length"}]})
    if options.get("include_usage"):
        last += _chunk({**head, "choices": [], "usage": _usage(tokens)})
    last += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    opening = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    for index in range(tokens):
        yield (opening if index == 0 else b"") + (last if index == tokens - 1 else middle)


def _chunk(value: dict[str, Any]) -> bytes:
    data = b"data: %b\n\n" % orjson.dumps(value)
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(status: int, value: dict[str, Any]) -> bytes:
    body = orjson.dumps(value)
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (status, b"OK" if status == 200 else b"Not Found", len(body))
    ) + body


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.stub_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one.")
    uvloop.run(serve_until_stopped(parser.parse_args().port, _Stub, backlog=512))


if __name__ == "__main__":
    main()
