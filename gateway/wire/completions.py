"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.wire.fields import Fields, as_token_ids
from gateway.wire.generation import MAX_TOP_LOGPROBS, Generation, read_generation
from gateway.wire.json_body import field_path, parse_object
from gateway.wire.unsupported import COMPLETIONS, refuse_unsupported

MAX_PROMPT_CHOICES = 128
DEFAULT_MAX_TOKENS = 16
"""What OpenAI's API generates when a completion does not say how much it wants."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`prompts` are texts or token ids. With `echo` and max_tokens 0 only the prompt is scored."""

    generation: Generation
    prompts: list[str | list[int]]
    logprobs: int | None
    echo: bool


def read_completion(body: bytes | bytearray) -> CompletionRequest:
    """Validate a completions body; raises the 400 that names the field which is wrong."""
    return completion_of(parse_object(body))


def completion_of(values: Mapping[str, object]) -> CompletionRequest:
    """As `read_completion`, of a body that has been parsed."""
    fields = Fields(values)
    refuse_unsupported(fields, COMPLETIONS)
    echo = fields.boolean("echo") or False
    generation = read_generation(fields, max_tokens=_read_max_tokens(fields, echo=echo))
    best_of = fields.integer("best_of", 1)
    if best_of is not None and best_of != generation.n:
        raise fields.wrong("best_of", "is only supported when it equals n.")
    prompts = _read_prompts(fields)
    if len(prompts) * generation.n > MAX_PROMPT_CHOICES:
        raise fields.wrong("prompt", f"times n may give at most {MAX_PROMPT_CHOICES} choices.")
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    unknown = tuple(fields.unread())
    return CompletionRequest(
        replace(generation, unknown=unknown) if unknown else generation, prompts, logprobs, echo
    )


def _read_max_tokens(fields: Fields, *, echo: bool) -> int:
    least = 0 if echo else 1
    newer = fields.integer("max_completion_tokens", least)
    older = fields.integer("max_tokens", least)
    if newer is not None:
        return newer
    return older if older is not None else DEFAULT_MAX_TOKENS


def _read_prompts(fields: Fields) -> list[str | list[int]]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    value = fields.value("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fields.wrong(
            "prompt",
            "is required and must be a string, an array of strings, an array of token ids, "
            "or an array of arrays of token ids.",
        )
    if not isinstance(value[0], str | list):
        return [_read_token_ids(fields, value, "prompt")]
    prompts: list[str | list[int]] = []
    for i, item in enumerate(value):
        name = field_path("prompt", i)
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list):
            prompts.append(_read_token_ids(fields, item, name))
        else:
            raise fields.wrong(name, "must be a string or an array of token ids.")
    return prompts


def _read_token_ids(fields: Fields, values: list[object], name: str) -> list[int]:
    if not values:
        raise fields.wrong(name, "must not be an empty array.")
    ids = as_token_ids(values)
    if ids is None:
        raise fields.wrong(name, "must hold only strings, or only token ids.")
    return ids
