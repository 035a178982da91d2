"""Answers of POST /v1/chat/completions.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from engine.tokenizer import Tokenizer
from gateway.sse import json_line
from gateway.text_choice import Delta, TokenEntry
from gateway.wire.reply import ChunkTemplate, ReplyHead, WholeChoice, wire_logprob
from gateway.wire.usage import Usage

_CHUNK = "chat.completion.chunk"
_WHOLE = "chat.completion"


class ChatReply:
    """Writes one chat answer, streamed or whole. Implements `ReplyFormat`."""

    def __init__(
        self, head: ReplyHead, tokenizer: Tokenizer, *, include_usage: bool, wants_logprobs: bool
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._chunk = ChunkTemplate(head, _CHUNK, include_usage=include_usage)
        self._wants_logprobs = wants_logprobs
        self._plain_end = b'},"logprobs":null,"finish_reason":null' + self._chunk.suffix
        self._starts: dict[int, bytes] = {}

    def opening(self, index: int) -> bytes:
        """The role, said once."""
        return b'%b%d,"delta":{"role":"assistant","content":""%b' % (
            self._chunk.prefix,
            index,
            self._plain_end,
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """A piece of content, always a string."""
        start = self._starts.get(index)
        if start is None:
            start = b'%b%d,"delta":{"content":' % (self._chunk.prefix, index)
            self._starts[index] = start
        content = json_line(delta.text)
        if not self._wants_logprobs:
            return start + content + self._plain_end
        logprobs = json_line(self._logprobs(delta.entries))
        return b'%b%b},"logprobs":%b,"finish_reason":null%b' % (
            start,
            content,
            logprobs,
            self._chunk.suffix,
        )

    def final(self, index: int, finish_reason: str) -> bytes:
        """The one chunk whose finish reason is not null."""
        return b'%b%d,"delta":{},"logprobs":null,"finish_reason":"%b"%b' % (
            self._chunk.prefix,
            index,
            finish_reason.encode(),
            self._chunk.suffix,
        )

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk."""
        return self._chunk.usage(usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """A chat.completion object."""
        return orjson.dumps(
            {
                **self._head.as_wire(_WHOLE),
                "choices": [
                    {
                        "index": choice.index,
                        "message": {
                            "role": "assistant",
                            "content": choice.text,
                            "refusal": None,
                        },
                        "logprobs": self._logprobs(choice.entries)
                        if self._wants_logprobs
                        else None,
                        "finish_reason": choice.finish_reason,
                    }
                    for choice in choices
                ],
                "usage": usage.as_wire(),
            }
        )

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, object]:
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob or 0.0),
                    "top_logprobs": [self._token(*alternative) for alternative in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, object]:
        """`bytes` are exact where `token` can only show U+FFFD; control tokens spell their name."""
        word = self._tokenizer.token_text(token_id)
        return {
            "token": word,
            "logprob": wire_logprob(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id) or word.encode()),
        }
