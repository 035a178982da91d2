"""Fields that are known, would change the result, and are not supported: a 400 that names them.

Each is accepted with a value that asks for nothing (an empty list, the default). Accepting more
would answer a question other than the one that was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.wire.fields import Fields

_Harmless = Callable[[object], bool]


def _one_of(*values: object) -> _Harmless:
    # `1 == True` in Python; JSON keeps them apart
    return lambda value: any(value == v and type(value) is type(v) for v in values)


def _number(neutral: float) -> _Harmless:
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value == neutral
    )


def _text_format(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _never(_: object) -> bool:
    return False


_EMPTY = _one_of([], {}, "")
_OFF = _one_of(False)

_BOTH: Mapping[str, _Harmless] = {
    "response_format": _text_format,
    "reasoning_effort": _one_of("none"),
    "min_tokens": _number(0),
    "bad_words": _EMPTY,
    "use_beam_search": _OFF,
    "length_penalty": _number(1),
    "prompt_logprobs": _never,
    "truncate_prompt_tokens": _never,
    "skip_special_tokens": _one_of(True),
    "include_stop_str_in_output": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "logits_processors": _EMPTY,
    "structured_outputs": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_choice": _EMPTY,
    "guided_grammar": _never,
    "grammar": _EMPTY,
    "json_schema": _never,
}

CHAT: Mapping[str, _Harmless] = {
    **_BOTH,
    "tools": _EMPTY,
    "tool_choice": _one_of("none", "auto"),
    "functions": _EMPTY,
    "function_call": _one_of("none", "auto"),
    "modalities": _one_of(["text"]),
    "audio": _never,
    "verbosity": _one_of("medium"),
    "web_search_options": _never,
    "add_generation_prompt": _one_of(True),
    "continue_final_message": _OFF,
    "chat_template": _never,
    "chat_template_kwargs": _EMPTY,
    "documents": _EMPTY,
    "echo": _OFF,
}

COMPLETIONS: Mapping[str, _Harmless] = {**_BOTH, "suffix": _EMPTY}

_SHAPE_THE_PROMPT = ("tools", "functions", "chat_template", "chat_template_kwargs", "documents")
NAMED_PREFIX: Mapping[str, _Harmless] = {name: CHAT[name] for name in _SHAPE_THE_PROMPT}

HINTS = frozenset({"metadata", "store", "parallel_tool_calls", "prediction"})
"""Known fields that ask for nothing which could change the text: accepted, without effect."""


def refuse_unsupported(fields: Fields, table: Mapping[str, _Harmless]) -> None:
    """Raise a 400 for the first field of `table` whose value asks for something."""
    for name in fields.given(table):
        if not table[name](fields.value(name)):
            raise fields.wrong(name, "is not supported by this server; leave it out.")
    fields.given(HINTS)
