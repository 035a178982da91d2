"""A chat that begins with a named prefix: `cached_content`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cache.block import Retention
from gateway.endpoints import Task, chat_task
from gateway.errors import bad_request
from gateway.named_cache import NamedCache
from gateway.named_caches import NamedCaches
from gateway.prompts import Prompt
from gateway.served_model import ServedModel
from gateway.tenants import Tenant
from gateway.wire.caches import cache_not_found, is_cache_name
from gateway.wire.chat import ChatRequest
from gateway.wire.messages import Conversation

_FIELD = "cached_content"


async def with_cached_content(
    task: Task, tenant: Tenant, model: ServedModel, asked: str, named: NamedCaches
) -> Task:
    """The task with the messages of the named prefix in front of its own, as if they had been sent.
    `asked` is the own name of the model that the client has asked for, which `model` may stand in
    for: there is nothing of the prefix to keep then.

    Raises a 404 ApiError for a name that is not this tenant's (or user's) or has expired, and a 400
    for a prefix of another model.
    """
    chat = task.chat
    if chat is None or chat.cached_content is None:
        return task
    user = task.generation.user if tenant.cache_scope == "user" else None
    if tenant.cache_scope == "none" or (tenant.cache_scope == "user" and user is None):
        raise cache_not_found(_FIELD)
    if not is_cache_name(chat.cached_content):
        raise cache_not_found(_FIELD)
    cache = await named.find(named.owner(tenant.id, user), chat.cached_content)
    if cache is None:
        raise cache_not_found(_FIELD)
    if cache.model not in (model.name, asked):
        raise bad_request(f"{_FIELD} names a prefix that was made for another model.", param=_FIELD)
    left_s = cache.expires_s - named.now_s()
    return _behind(cache, chat, left_s if cache.model == model.name else None)


def _behind(cache: NamedCache, chat: ChatRequest, left_s: float | None) -> Task:
    """Using a prefix keeps it for the rest of its time, also where a tier has lost it meanwhile;
    None: it is not kept there."""
    whole = chat_task(replace(chat, conversation=put_before(cache.messages, chat.conversation)))
    if left_s is None:
        return whole
    kept = Retention(cache.tokens, math.ceil(max(left_s, 1)), durable=True)

    async def encode(model: ServedModel) -> list[Prompt]:
        return [
            replace(prompt, retention=(*prompt.retention, kept))
            for prompt in await whole.encode(model)
        ]

    return replace(whole, encode=encode)


def put_before(earlier: Sequence[dict[str, object]], own: Conversation) -> Conversation:
    """One conversation of both; what a request says of its own messages still means those."""
    shift = len(earlier)
    calls_tool = any("tool_calls" in message for message in earlier)
    has_result = any(message["role"] == "tool" for message in earlier)
    return replace(
        own,
        messages=[*earlier, *own.messages],
        tool_call_path=_FIELD if calls_tool else own.tool_call_path,
        tool_result_path=_FIELD if has_result else own.tool_result_path,
        breakpoints=tuple(
            replace(point, message=point.message + shift) for point in own.breakpoints
        ),
    )
