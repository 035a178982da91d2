"""Answers of POST /v1/completions.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from engine.tokenizer import Tokenizer
from gateway.text_choice import Delta, TokenEntry
from gateway.wire.reply import ChunkTemplate, ReplyHead, WholeChoice, wire_logprob
from gateway.wire.usage import Usage

_KIND = "text_completion"


class CompletionReply:
    """Writes one completions answer, streamed or whole. Implements `ReplyFormat`."""

    def __init__(
        self, head: ReplyHead, tokenizer: Tokenizer, *, include_usage: bool, wants_logprobs: bool
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._chunk = ChunkTemplate(
            head, _KIND, before=b'"text":', after=b"", include_usage=include_usage
        )
        self._wants_logprobs = wants_logprobs

    def opening(self, index: int) -> bytes:  # noqa: ARG002 - a completion has no role to say
        """Nothing."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """A piece of text, always a string."""
        logprobs = self._logprobs(delta.entries) if self._wants_logprobs else None
        return self._chunk.piece(index, delta.text, logprobs)

    def final(self, index: int, finish_reason: str) -> bytes:
        """The one chunk whose finish reason is not null."""
        return self._chunk.bare(index, b'"text":""', finish_reason)

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk."""
        return self._chunk.usage(usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """A text_completion object."""
        return orjson.dumps(
            {
                **self._head.as_wire(_KIND),
                "choices": [
                    {
                        "index": choice.index,
                        "text": choice.text,
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
            "tokens": [self._word(entry.token_id) for entry in entries],
            "token_logprobs": [
                None if entry.logprob is None else wire_logprob(entry.logprob) for entry in entries
            ],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenEntry) -> dict[str, float] | None:
        """The alternatives, and the chosen token even if it is none of them."""
        if entry.logprob is None:
            return None
        top = {self._word(token_id): wire_logprob(logprob) for token_id, logprob in entry.top}
        top.setdefault(self._word(entry.token_id), wire_logprob(entry.logprob))
        return top

    def _word(self, token_id: int) -> str:
        """A token's text; of one that is no text by itself its bytes, as in OpenAI's answers
        (`bytes:\\xe2\\x80`). Words are keys of `top_logprobs`, and many tokens would be U+FFFD."""
        own = self._tokenizer.token_bytes(token_id)
        try:
            own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)
        return self._tokenizer.token_text(token_id)
