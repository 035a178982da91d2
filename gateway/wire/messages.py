"""Chat messages: validated, and turned into what a chat template reads."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from gateway.errors import bad_request
from gateway.wire.cache_control import Breakpoint, CacheControls
from gateway.wire.fields import Fields
from gateway.wire.json_body import field_path, nests_deeply

MAX_MESSAGES = 4096
_CHARACTERS_PER_TURN = 64
"""What a template and its control tokens cost beside a turn's own text, as characters of it."""
PART_JOINER = ""
"""Text parts are pieces of one text: what stands between them, the client writes."""

Message = dict[str, object]
"""As templates know it: role, content (always a string), name, tool_calls, tool_call_id."""

TEMPLATE_ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer word for it; templates know the older one
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""From the API's roles to those that templates know."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """`tool_call_path` and `tool_result_path` are those of the first turns that need a template
    which can show tools; `breakpoints` say how long to keep which beginnings of the prompt."""

    messages: list[Message]
    tool_call_path: str | None
    tool_result_path: str | None
    unknown: tuple[str, ...]
    breakpoints: tuple[Breakpoint, ...] = ()

    def characters(self) -> int:
        """About how much text there is, to decide where to tokenize it."""
        return _characters(self.messages) + _CHARACTERS_PER_TURN * len(self.messages)


def read_messages(fields: Fields) -> Conversation:
    """The `messages` field; raises a 400 that names the part which is wrong."""
    values = fields.array("messages")
    if not values:
        raise fields.wrong("messages", "is required and must be a non-empty array.")
    if len(values) > MAX_MESSAGES:
        raise fields.wrong("messages", f"may hold at most {MAX_MESSAGES} messages.")
    messages: list[Message] = []
    call_path: str | None = None
    result_path: str | None = None
    unknown: set[str] = set()
    controls = CacheControls()
    for i, value in enumerate(values):
        path = field_path("messages", i)
        if not isinstance(value, dict):
            raise bad_request(f"{path} must be an object.", param=path)
        item = Fields(value, path)
        message = _read_message(item, i, controls)
        messages.append(message)
        if "tool_calls" in message:
            call_path = call_path or item.path("tool_calls")
        if message["role"] == "tool":
            result_path = result_path or path
        unknown.update(item.unread())
    unknown |= controls.unknown
    return Conversation(
        messages, call_path, result_path, tuple(unknown), tuple(controls.breakpoints)
    )


def _characters(value: object) -> int:
    """Characters of every string in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _characters(each) for key, each in value.items())
    if isinstance(value, list):
        return sum(map(_characters, value))
    return 1


def _read_message(item: Fields, index: int, controls: CacheControls) -> Message:
    role = TEMPLATE_ROLES.get(item.required_string("role"))
    if role is None:
        raise item.wrong("role", "must be system, developer, user, assistant or tool.")
    message: Message = {"role": role}
    name = item.string("name")
    if name:
        message["name"] = name
    if role == "assistant":
        _read_assistant(item, message, index, controls)
    else:
        message["content"] = _read_content(item, role, index, controls)
    if role == "tool":
        message["tool_call_id"] = item.required_string("tool_call_id")
    controls.read(item, index, None)
    return message


def _read_assistant(item: Fields, message: Message, index: int, controls: CacheControls) -> None:
    """An assistant turn may have no content: a call of a tool, or nothing at all."""
    for name in ("function_call", "audio"):
        if item.value(name) is not None:
            raise item.wrong(name, "is not supported by this server.")
    content = item.value("content")
    message["content"] = (
        "" if content is None else _read_content(item, "assistant", index, controls)
    )
    refusal = item.string("refusal")
    if refusal and not message["content"]:
        message["content"] = refusal
    reasoning = item.string("reasoning_content")
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = item.array("tool_calls")
    if calls:
        path = item.path("tool_calls")
        message["tool_calls"] = [
            _read_call(call, field_path(path, i)) for i, call in enumerate(calls)
        ]


def _read_content(item: Fields, role: str, index: int, controls: CacheControls) -> str:
    value = item.value("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise item.wrong("content", "is required and must be a string or an array of text parts.")
    path = item.path("content")
    if not value:
        raise item.wrong("content", "must not be an empty array.")
    pieces: list[str] = []
    characters = 0
    for i, part in enumerate(value):
        part_path = field_path(path, i)
        if not isinstance(part, dict):
            raise bad_request(f"{part_path} must be an object with a type.", param=part_path)
        fields = Fields(part, part_path)
        pieces.append(_read_part(fields, part_path, role))
        characters += len(pieces[-1])
        controls.read(fields, index, characters + len(PART_JOINER) * i)
    return PART_JOINER.join(pieces)


def _read_part(part: Fields, path: str, role: str) -> str:
    kind = part.value("type")
    if kind == "refusal" and role == "assistant":
        return part.required_string("refusal")
    if kind != "text":
        raise bad_request(f"{path} must be a text part; this model reads only text.", param=path)
    return part.required_string("text")


def _read_call(call: object, path: str) -> Message:
    if not isinstance(call, dict):
        raise bad_request(f"{path} must be an object.", param=path)
    fields = Fields(call, path)
    if fields.value("type") not in (None, "function"):
        raise fields.wrong("type", "must be function.")
    function = fields.object("function")
    if function is None:
        raise fields.wrong("function", "is required and must be an object.")
    return {
        "id": fields.string("id") or "",
        "type": "function",
        "function": {
            "name": function.required_string("name"),
            "arguments": _parse_arguments(function.string("arguments") or "{}"),
        },
    }


def _parse_arguments(arguments: str) -> object:
    """Templates print an object; a model's malformed arguments stay the text that they are, and so
    do those that nest deeper than a body may."""
    text = arguments.encode()
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return arguments
    return parsed if isinstance(parsed, dict) and not nests_deeply(parsed, text) else arguments
