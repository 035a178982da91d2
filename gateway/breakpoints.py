"""Where a conversation's cache breakpoints lie in its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from cache.block import Retention
from engine.chat_template import ChatTemplate
from engine.errors import TemplateError
from gateway.token_prefix import as_bytes, common_tokens
from gateway.wire.cache_control import Breakpoint
from gateway.wire.messages import Conversation, Message

_SAID_IN_A_TURN = ("tool_calls", "reasoning_content")


def kept_prefixes(
    token_ids: Sequence[int], conversation: Conversation, template: ChatTemplate, now: datetime
) -> tuple[Retention, ...]:
    """One retention per breakpoint of the conversation whose prompt is `token_ids`.

    Costs one rendering and tokenization of the conversation's beginning for each. `now` must be
    what the prompt was rendered with.
    """
    if not conversation.breakpoints:
        return ()
    prompt = as_bytes(token_ids)
    return tuple(
        Retention(
            _tokens_until(point, conversation.messages, prompt, template, now),
            point.ttl.seconds,
            point.ttl.durable,
        )
        for point in conversation.breakpoints
    )


def _tokens_until(
    point: Breakpoint,
    messages: list[Message],
    prompt: bytes,
    template: ChatTemplate,
    now: datetime,
) -> int:
    """How far the prompt agrees with the rendering of the conversation cut right behind the part.

    Some templates show a system turn only inside the turn after it, hence that turn, emptied. One
    that refuses the cut conversation altogether leaves the whole prompt to be kept, which is more
    than was asked for, not less.
    """
    beginning = [*messages[: point.message], _cut(messages[point.message], point.characters)]
    follower = [_emptied(message) for message in messages[point.message + 1 : point.message + 2]]
    attempts = [beginning + follower, beginning] if follower else [beginning]
    for attempt in attempts:
        try:
            rendered = template.encode(attempt, now=now, add_generation_prompt=False)
        except TemplateError:
            continue
        return common_tokens(prompt, as_bytes(rendered))
    return common_tokens(prompt, prompt)


def _cut(message: Message, characters: int | None) -> Message:
    return message if characters is None else {**message, "content": _text(message)[:characters]}


def _emptied(message: Message) -> Message:
    kept = {key: value for key, value in message.items() if key not in _SAID_IN_A_TURN}
    return {**kept, "content": ""}


def _text(message: Message) -> str:
    content = message["content"]
    if not isinstance(content, str):
        raise TypeError("a validated message's content is a string")
    return content
