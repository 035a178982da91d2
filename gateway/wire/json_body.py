"""From a body's bytes to one JSON object, or a 400 that says where it went wrong."""

from __future__ import annotations

import gc
import json

import orjson

from gateway.errors import ApiError, bad_request

_EXPLAINED_BYTES = 1 << 20
"""Beyond that, finding out where a broken body is wrong would hold up everybody else."""

MOST_LEVELS = 200
"""How deep a body may nest. orjson reads 1,024 levels and writes 254, and what passes a body on, or
walks it by recursion, must be able to with something of its own around it."""
_WRITABLE_LEVELS = 254


def parse_object(body: bytes | bytearray, *, what: str = "body") -> dict[str, object]:
    """The body as a JSON object. `what` it is called in a refusal.

    NaN, Infinity, comments and nesting beyond MOST_LEVELS are refused; of duplicate keys the last
    counts. A lone surrogate escape is no Unicode text: it is refused, with the path of its field
    unless the body is large.
    """
    try:
        value = _loads(body)
    except orjson.JSONDecodeError:
        raise _explain(body, what) from None
    if nests_deeply(value, body):
        raise bad_request(f"The {what} nests deeper than {MOST_LEVELS} levels.")
    if not isinstance(value, dict):
        raise bad_request(f"The {what} must be a JSON object.")
    return value


def nests_deeply(value: object, text: bytes | bytearray) -> bool:
    """Whether a value that was read from this JSON text has more than MOST_LEVELS levels."""
    if text.count(b"[") + text.count(b"{") <= MOST_LEVELS:
        return False
    wrapped = value
    for _ in range(_WRITABLE_LEVELS - MOST_LEVELS):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)
    except orjson.JSONEncodeError:
        return True
    return False


def field_path(parent: str, key: str | int) -> str:
    """OpenAI's notation: `messages[0].content`."""
    if isinstance(key, int):
        return f"{parent}[{key}]"
    return f"{parent}.{key}" if parent else key


def _loads(body: bytes | bytearray) -> object:
    # What a parser makes has no cycles. Left on, the collector would walk the growing value again
    # and again: seconds, in which no stream gets a token, for a body of millions of empty arrays.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        if collecting:
            gc.enable()


def _explain(body: bytes | bytearray, what: str) -> ApiError:
    # Only the strict parser refuses lone surrogates, so the lenient one can show where they are.
    if len(body) <= _EXPLAINED_BYTES and (b"\\ud" in body or b"\\uD" in body):
        try:
            path = _lone_surrogate_path(json.loads(body))
        except (ValueError, RecursionError):
            path = None
        if path is not None:
            where = path or f"the {what}"
            return bad_request(
                f"{where} contains a lone surrogate escape, which is not Unicode text.",
                param=path or None,
            )
    return bad_request(f"The {what} is not valid JSON.")


def _lone_surrogate_path(root: object) -> str | None:
    """The path of the first field that holds a lone surrogate; a bad key counts for its parent."""
    pending: list[tuple[str, object]] = [("", root)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str):
            if _has_surrogate(value):
                return path
        elif isinstance(value, list):
            pending += [(field_path(path, i), item) for i, item in enumerate(value)][::-1]
        elif isinstance(value, dict):
            if any(map(_has_surrogate, value)):
                return path
            pending += [(field_path(path, key), item) for key, item in value.items()][::-1]
    return None


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
