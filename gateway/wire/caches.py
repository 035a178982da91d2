"""Bodies and answers of /v1/caches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.errors import ApiError, bad_request
from gateway.named_cache import NamedCache
from gateway.settings_units import duration_s
from gateway.wire.fields import Fields
from gateway.wire.generation import read_user
from gateway.wire.json_body import parse_object
from gateway.wire.messages import Conversation, read_messages
from gateway.wire.unknown_names import refuse_unknown_fields
from gateway.wire.unsupported import NAMED_PREFIX, refuse_unsupported
from gateway.wire.usage import Usage

LEAST_TTL_S = 60
MOST_TTL_S = 30 * 86_400
DEFAULT_TTL_S = 3600
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}")

_SHARED = "all of the tenant's chats can begin with a named prefix, whatever they send."
_OF_CHATS: Mapping[str, str] = {
    "prompt_cache_key": _SHARED,
    "cache_salt": _SHARED,
    "prompt_cache_retention": "a named prefix is kept for its ttl.",
    "cached_content": "a named prefix cannot begin with another one.",
}
"""Fields that mean something in a chat and would mean something else here, with the reason."""

_OF_EXTENSIONS = ("ttl", "user", "safety_identifier")
_OF_NEW = ("name", "model", "messages", *_OF_EXTENSIONS)


@dataclass(frozen=True, slots=True)
class NewCache:
    """The body that creates a named prefix. `unknown` are names within its messages that no field
    there has, which are passed over as in a chat."""

    name: str
    model: str
    user: str | None
    conversation: Conversation
    ttl_s: float
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Extension:
    """The body that extends one."""

    ttl_s: float
    user: str | None


def read_new_cache(body: bytes | bytearray) -> NewCache:
    """Validate it; raises the 400 that names the field which is wrong."""
    fields = Fields(parse_object(body))
    name = fields.required_string("name")
    if not is_cache_name(name):
        raise fields.wrong("name", "must be 1 to 64 letters, digits or any of . _ -")
    model = fields.required_string("model")
    conversation = read_messages(fields)
    if conversation.breakpoints:
        raise bad_request(
            "cache_control has no place here: all of a named prefix is kept for its ttl.",
            param="messages",
        )
    refuse_unsupported(fields, NAMED_PREFIX)
    for field in fields.given(_OF_CHATS):
        raise fields.wrong(field, f"has no place here: {_OF_CHATS[field]}")
    ttl_s, user = _read_ttl(fields), read_user(fields)
    refuse_unknown_fields(fields.unread(), _OF_NEW)
    return NewCache(name, model, user, conversation, ttl_s, tuple(conversation.unknown))


def read_extension(body: bytes | bytearray) -> Extension:
    """Validate it; raises the 400 that names the field which is wrong."""
    fields = Fields(parse_object(body))
    ttl_s, user = _read_ttl(fields), read_user(fields)
    refuse_unknown_fields(fields.unread(), _OF_EXTENSIONS)
    return Extension(ttl_s, user)


def is_cache_name(name: str) -> bool:
    """Whether a named prefix can be called this; what paths treat specially is no name."""
    return _NAME.fullmatch(name) is not None


def cache_not_found(param: str | None = None) -> ApiError:
    """404: none of this name, one that has expired, or somebody else's; all look the same."""
    return ApiError(
        404,
        "There is no named prefix of this name, or it has expired; GET /v1/caches lists them.",
        param=param,
        code="cache_not_found",
    )


def cache_card(cache: NamedCache) -> dict[str, object]:
    """One named prefix; its messages are not shown."""
    return {
        "object": "cache",
        "name": cache.place.name,
        "model": cache.model,
        "tokens": cache.tokens,
        "created": int(cache.created_s),
        "expires_at": int(cache.expires_s),
        "cached_tokens": cache.cached_tokens,
        "bytes": cache.kv_bytes,
    }


def run_card(cache: NamedCache, usage: Usage) -> dict[str, object]:
    """One that was just run through the model, and what that cost."""
    return {**cache_card(cache), "usage": usage.as_wire()}


def cache_list(caches: Iterable[NamedCache]) -> dict[str, object]:
    """All of them."""
    return {"object": "list", "data": [cache_card(cache) for cache in caches]}


def deletion(name: str) -> dict[str, object]:
    """What a deleted one leaves."""
    return {"object": "cache.deleted", "name": name, "deleted": True}


def _read_ttl(fields: Fields) -> float:
    value = fields.value("ttl")
    if value is None:
        return DEFAULT_TTL_S
    try:
        ttl_s = duration_s(value) if not isinstance(value, bool) else -1.0
    except ValueError:
        ttl_s = -1.0
    if not LEAST_TTL_S <= ttl_s <= MOST_TTL_S:
        raise fields.wrong("ttl", 'must be 1 minute to 30 days: seconds, or such as "90m", "1h".')
    return ttl_s
