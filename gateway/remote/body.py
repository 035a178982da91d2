"""A request's body on its way to a remote server: what the gateway must understand of it, and what
it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import orjson

from gateway.errors import bad_request
from gateway.remote.refused_fields import refuse_servers_own, without_servers_own
from gateway.settings_fleet import RemoteEngine
from gateway.wire.completions import DEFAULT_MAX_TOKENS
from gateway.wire.fields import Fields
from gateway.wire.generation import MAX_CHOICES, read_tier, read_user

EndpointName = Literal["chat", "completions"]

PATHS: Mapping[EndpointName, str] = {"chat": "/chat/completions", "completions": "/completions"}

_NARROWING = ("prompt_cache_key", "cache_salt", "extra_key")
"""Strings of the client's that keep its prompts apart within its tenant; the last is SGLang's."""
_TAKES_SEEDS: frozenset[RemoteEngine] = frozenset({"vllm", "sglang", "llama.cpp", "forebay"})
_TAKES_SALTS: frozenset[RemoteEngine] = frozenset({"vllm", "sglang"})
_MAX_PROMPTS = 2048
_MOST_TOKENS = (1 << 31) - 1
"""Of an answer. No server makes so many; beyond, sums would not fit where limits are kept."""
_OWN_IDS = ("request_id", "rid", "session_id")
"""Under these vLLM and SGLang would take a client's word for the name of a request or a session;
two tenants could choose the same."""


class RelayBody(NamedTuple):
    """A client's body. `values` is what it sent; `max_tokens` None: it did not say.

    `choices` is how many there will be over all `prompts`, `narrowing` its own strings that keep
    prompts apart. `continuous_usage` asks for the usage in every chunk. `service_tier` is the one
    that was asked for.
    """

    endpoint: EndpointName
    values: Mapping[str, object]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    choices: int
    max_tokens: int | None
    user: str | None
    narrowing: tuple[tuple[str, str], ...]
    wants_seed: bool
    service_tier: str | None = None
    prompts: int = 1


def read_body(values: Mapping[str, object], endpoint: str) -> RelayBody:
    """Check what the gateway goes by, and leave the rest to the server.

    Raises a 400 ApiError that names the field which is wrong. Null means omitted.
    """
    if endpoint not in PATHS:
        raise ValueError(f"{endpoint} is no endpoint that can be relayed")
    name: EndpointName = "chat" if endpoint == "chat" else "completions"
    fields = Fields(values)
    fields.required_string("model")
    if fields.value("cached_content") is not None:
        raise fields.wrong("cached_content", "is not supported for models that run elsewhere.")
    refuse_servers_own(fields)
    prompts = _count_prompts(fields) if name == "completions" else _check_messages(fields)
    stream = fields.boolean("stream") or False
    options = fields.object("stream_options") if stream else None
    temperature = fields.number("temperature", 0, 1e6)
    return RelayBody(
        endpoint=name,
        values=values,
        stream=stream,
        include_usage=(options.boolean("include_usage") or False) if options else False,
        continuous_usage=(options.boolean("continuous_usage_stats") or False) if options else False,
        choices=prompts * (fields.integer("n", 1, MAX_CHOICES) or 1),
        max_tokens=_read_max_tokens(fields, name),
        user=read_user(fields),
        narrowing=_read_narrowing(fields),
        wants_seed=fields.value("seed") is None and temperature != 0,
        service_tier=read_tier(fields),
        prompts=prompts,
    )


def upstream_body(
    body: RelayBody,
    *,
    engine: RemoteEngine,
    served_model: str,
    shares_cache: bool,
    salt: str,
    seed: int,
) -> bytes:
    """What goes to the server: the client's JSON, with our names for what is ours to say.

    `salt` keeps the prompt cache of servers that know salts apart, `shares_cache` says that the
    operator accepts one cache for all on a server that does not. `seed` goes along where the client
    gave none, so that the same answer can be had again.
    """
    values = without_servers_own(body.values)
    values["model"] = served_model
    if engine != "forebay":
        # a tier there is not one of ours, and may cost the operator more
        for name in ("cache_salt", "extra_key", "service_tier", *_OWN_IDS):
            values.pop(name, None)
        if engine != "openai":
            values.pop("prompt_cache_key", None)
    if engine in _TAKES_SALTS:
        values["cache_salt"] = salt
    if engine == "llama.cpp" and not shares_cache:
        values["cache_prompt"] = False
    if body.wants_seed and engine in _TAKES_SEEDS:
        values["seed"] = seed
    if body.stream:
        options = values.get("stream_options")
        given = options if isinstance(options, dict) else {}
        values["stream_options"] = {**given, "include_usage": True}
    return orjson.dumps(values)


def _check_messages(fields: Fields) -> int:
    messages = fields.array("messages")
    if not messages:
        raise fields.wrong("messages", "is required and must be a non-empty array.")
    return 1


def _count_prompts(fields: Fields) -> int:
    """How many prompts there are: an array of ids is one, an array of strings or arrays several."""
    prompt = fields.value("prompt")
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list) or not prompt:
        raise fields.wrong("prompt", "is required and must be a string or a non-empty array.")
    count = len(prompt) if isinstance(prompt[0], str | list) else 1
    if count > _MAX_PROMPTS:
        raise fields.wrong("prompt", f"may hold at most {_MAX_PROMPTS} prompts.")
    return count


def _read_max_tokens(fields: Fields, endpoint: EndpointName) -> int | None:
    scores = endpoint == "completions" and fields.value("echo") is True
    least = 0 if scores else 1
    newer = fields.integer("max_completion_tokens", least, _MOST_TOKENS)
    older = fields.integer("max_tokens", least, _MOST_TOKENS)
    if newer is not None:
        return newer
    if older is None and endpoint == "completions":
        return DEFAULT_MAX_TOKENS
    return older


def _read_narrowing(fields: Fields) -> tuple[tuple[str, str], ...]:
    given = []
    for name in _NARROWING:
        value = fields.value(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise bad_request(f"{name} must be a string.", param=name)
        if value:
            given.append((name, value))
    return tuple(given)
