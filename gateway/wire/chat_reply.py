"""Answers of POST /v1/chat/completions.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from engine.tokenizer import Tokenizer
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
        self._chunk = ChunkTemplate(
            head, _CHUNK, before=b'"delta":{"content":', after=b"}", include_usage=include_usage
        )
        self._wants_logprobs = wants_logprobs

    def opening(self, index: int) -> bytes:
        """The role, said once."""
        return self._chunk.bare(index, b'"delta":{"role":"assistant","content":""}')

    def delta(self, index: int, delta: Delta) -> bytes:
        """A piece of content, always a string."""
        logprobs = self._logprobs(delta.entries) if self._wants_logprobs else None
        return self._chunk.piece(index, delta.text, logprobs)

    def final(self, index: int, finish_reason: str) -> bytes:
        """The one chunk whose finish reason is not null."""
        return self._chunk.bare(index, b'"delta":{}', finish_reason)

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
