"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.wire.fields import Fields
from gateway.wire.generation import MAX_TOP_LOGPROBS, Generation, read_generation
from gateway.wire.json_body import parse_object
from gateway.wire.messages import Conversation, read_messages
from gateway.wire.unsupported import CHAT, refuse_unsupported


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`logprobs` is how many alternatives to show beside each token, None for no logprobs.
    `cached_content` is the named prefix that stands before the messages."""

    generation: Generation
    conversation: Conversation
    logprobs: int | None
    cached_content: str | None = None


def read_chat(body: bytes | bytearray) -> ChatRequest:
    """Validate a chat body; raises the 400 that names the field which is wrong."""
    return chat_of(parse_object(body))


def chat_of(values: Mapping[str, object]) -> ChatRequest:
    """As `read_chat`, of a body that has been parsed."""
    fields = Fields(values)
    refuse_unsupported(fields, CHAT)
    # the newer name wins where both are given
    newer, older = fields.integer("max_completion_tokens", 1), fields.integer("max_tokens", 1)
    generation = read_generation(fields, max_tokens=newer if newer is not None else older)
    conversation = read_messages(fields)
    logprobs = _read_logprobs(fields)
    cached_content = fields.string("cached_content")
    unknown = (*fields.unread(), *conversation.unknown)
    return ChatRequest(
        replace(generation, unknown=unknown) if unknown else generation,
        conversation,
        logprobs,
        cached_content,
    )


def _read_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if wanted:
        return top or 0
    if top:
        raise fields.wrong("top_logprobs", "is only allowed when logprobs is true.")
    return None
