"""What chat and completions have in common: which model, how to sample, how to deliver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.sampling_params import LEAST_REPETITION_PENALTY
from gateway.wire.fields import Fields, as_integer
from policies.service_class import SERVICE_TIERS

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20

_INT64 = 1 << 63
_RETENTIONS = {"in_memory": None, "in-memory": None, "24h": 86_400}


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling fields as the client gave them; None is the model's own default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    seed: int | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Generation:
    """The fields of either endpoint that say what to generate and how to deliver it.

    `max_tokens` None is whatever the context leaves. `user` is who asks inside the tenant,
    `cache_salts` are strings that must agree before two prompts may share KV, `keep_prompt_s` is
    how long to keep the whole prompt (None: as long as it is worth it). `service_tier` is the one
    that was asked for. `unknown` are names that no field of the API has.
    """

    model: str
    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: Sampling
    user: str | None
    cache_salts: tuple[tuple[str, str], ...]
    keep_prompt_s: int | None = None
    service_tier: str | None = None
    unknown: tuple[str, ...] = ()


def read_generation(fields: Fields, *, max_tokens: int | None) -> Generation:
    """Read the common fields; `max_tokens` was settled by the endpoint. `unknown` stays empty."""
    model = fields.required_string("model")
    stream = fields.boolean("stream") or False
    return Generation(
        model=model,
        stream=stream,
        include_usage=_read_include_usage(fields, stream=stream),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        max_tokens=max_tokens,
        stop=_read_stop(fields),
        sampling=_read_sampling(fields),
        user=read_user(fields),
        cache_salts=_read_cache_salts(fields),
        keep_prompt_s=_read_retention(fields),
        service_tier=read_tier(fields),
    )


def _read_sampling(fields: Fields) -> Sampling:
    return Sampling(
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.integer("top_k", -1),
        min_p=fields.number("min_p", 0, 1),
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        repetition_penalty=fields.number("repetition_penalty", LEAST_REPETITION_PENALTY, 10),
        logit_bias=_read_logit_bias(fields),
        seed=fields.integer("seed", -_INT64, _INT64 - 1),
        stop_token_ids=_read_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos") or False,
    )


def _read_include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise fields.wrong("stream_options", "is only allowed when stream is true.")
    if options.boolean("continuous_usage_stats"):
        raise options.wrong("continuous_usage_stats", "is not supported by this server.")
    options.boolean("include_obfuscation")
    return options.boolean("include_usage") or False


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise fields.wrong("stop", "must be a string or an array of strings.")
    if len(stops) > MAX_STOPS:
        raise fields.wrong("stop", f"may hold at most {MAX_STOPS} strings.")
    result = []
    for stop in stops:
        if not isinstance(stop, str):
            raise fields.wrong("stop", "must be a string or an array of strings.")
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise fields.wrong("stop", f"must hold strings of 1 to {MAX_STOP_CHARS} characters.")
        result.append(stop)
    return tuple(result)


def _read_stop_token_ids(fields: Fields) -> frozenset[int]:
    values = fields.array("stop_token_ids")
    if not values:
        return frozenset()
    if len(values) > MAX_STOP_TOKEN_IDS:
        raise fields.wrong("stop_token_ids", f"may hold at most {MAX_STOP_TOKEN_IDS} ids.")
    ids = [as_integer(value) for value in values]
    if any(token is None or token < 0 for token in ids):
        raise fields.wrong("stop_token_ids", "must hold token ids.")
    return frozenset(token for token in ids if token is not None)


def _read_logit_bias(fields: Fields) -> Mapping[int, float]:
    value = fields.value("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.wrong("logit_bias", "must be an object of token ids and numbers.")
    if len(value) > MAX_LOGIT_BIASES:
        raise fields.wrong("logit_bias", f"may hold at most {MAX_LOGIT_BIASES} tokens.")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # isascii: other scripts' digits are digits to str.isdigit, but no token ids
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise fields.wrong("logit_bias", "must have token ids as its keys.")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise fields.wrong("logit_bias", "must have numbers as its values.")
        if not -100 <= bias <= 100:
            raise fields.wrong("logit_bias", "must have values between -100 and 100.")
        biases[int(key)] = float(bias)
    return biases


def read_user(fields: Fields) -> str | None:
    """Who asks inside the tenant."""
    identifier, user = fields.string("safety_identifier"), fields.string("user")
    return identifier or user or None


def read_tier(fields: Fields) -> str | None:
    """OpenAI's `service_tier`, as it was asked for."""
    tier = fields.string("service_tier")
    if tier is not None and tier not in SERVICE_TIERS:
        raise fields.wrong("service_tier", f"must be one of {', '.join(SERVICE_TIERS)}.")
    return tier


def _read_cache_salts(fields: Fields) -> tuple[tuple[str, str], ...]:
    salts = [(name, fields.string(name)) for name in ("prompt_cache_key", "cache_salt")]
    return tuple((name, salt) for name, salt in salts if salt)


def _read_retention(fields: Fields) -> int | None:
    """OpenAI's `prompt_cache_retention`, in both spellings that its documents have."""
    wanted = fields.string("prompt_cache_retention")
    if wanted is None:
        return None
    if wanted not in _RETENTIONS:
        raise fields.wrong("prompt_cache_retention", "must be in_memory or 24h.")
    return _RETENTIONS[wanted]
