"""Running a prefix through its model once, so that its blocks lie in the tiers and are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gateway.endpoints import Task
from gateway.errors import ApiError, bad_request
from gateway.prompts import Prompt, encode_conversation
from gateway.served_model import ServedModel
from gateway.token_prefix import as_bytes, common_tokens
from gateway.wire.chat_reply import ChatReply
from gateway.wire.generation import Generation, Sampling
from gateway.wire.messages import Conversation, Message

_TURN_OPENING_TOKENS = 16
"""More than templates need to say that a user's turn begins, less than a prefix worth a name."""

_GREEDY = Sampling(
    temperature=0.0,
    top_p=None,
    top_k=None,
    min_p=None,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=None,
    logit_bias={},
    seed=0,
    stop_token_ids=frozenset(),
    ignore_eos=False,
)


def warming_task(conversation: Conversation, model: str, user: str | None, seconds: float) -> Task:
    """The beginning that chats with these messages share (`encode_prefix`), all of which is to be
    kept for `seconds`, in every tier; the one token that it generates is nobody's."""
    generation = Generation(
        model=model,
        stream=False,
        include_usage=False,
        n=1,
        max_tokens=1,
        stop=(),
        sampling=_GREEDY,
        user=user,
        cache_salts=(),
        keep_prompt_s=math.ceil(seconds),
    )

    async def encode(served: ServedModel) -> list[Prompt]:
        return [await encode_prefix(conversation, served)]

    return Task(generation, "messages", None, False, encode, ChatReply)


async def encode_prefix(conversation: Conversation, model: ServedModel) -> Prompt:
    """The tokens with which every chat begins that has these messages before a user's turn.

    Mostly they are the messages rendered without the opening of an answer. But some templates show
    a system turn only inside the turn after it, or not alone: then it is what two chats with
    different next turns have in common. Raises a 400 ApiError for messages that the template
    refuses either way, or shows nothing of.
    """
    alone = await _rendered(conversation, model)
    one = await _rendered(_followed_by("x", conversation), model)
    if isinstance(one, ApiError):
        # what no user's turn may follow, such as another user's, may be followed by an answer
        prefix = alone
    else:
        other = await encode_conversation(
            _followed_by("y", conversation), model, add_generation_prompt=False
        )
        shared = common_tokens(as_bytes(one.token_ids), as_bytes(other.token_ids))
        begun = replace(one, token_ids=one.token_ids[:shared], messages=len(conversation.messages))
        prefix = _shorter(alone, begun)
    if isinstance(prefix, ApiError):
        raise prefix
    if not prefix.token_ids:
        raise bad_request(
            "The model's chat template shows nothing of these messages on their own.",
            param="messages",
        )
    return prefix


def _shorter(alone: Prompt | ApiError, shared: Prompt) -> Prompt:
    """The messages alone, if all that they lack of what is shared is the opening of a next turn,
    which need not be a user's."""
    if isinstance(alone, ApiError):
        return shared
    size = len(alone.token_ids)
    begins = alone.token_ids == shared.token_ids[:size]
    opening = len(shared.token_ids) - size
    return alone if begins and opening <= _TURN_OPENING_TOKENS else shared


async def _rendered(conversation: Conversation, model: ServedModel) -> Prompt | ApiError:
    try:
        return await encode_conversation(conversation, model, add_generation_prompt=False)
    except ApiError as refusal:
        return refusal


def _followed_by(text: str, conversation: Conversation) -> Conversation:
    turn: Message = {"role": "user", "content": text}
    return replace(conversation, messages=[*conversation.messages, turn])


def conversation_of(messages: Sequence[Message]) -> Conversation:
    """Messages that were validated before, as a conversation again."""
    calls_tool = any("tool_calls" in message for message in messages)
    has_result = any(message["role"] == "tool" for message in messages)
    return Conversation(
        messages=list(messages),
        tool_call_path="messages" if calls_tool else None,
        tool_result_path="messages" if has_result else None,
        unknown=(),
    )
