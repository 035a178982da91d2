"""What a server says when it does not do what it was asked to, in one line."""

from __future__ import annotations

import orjson

from loadtest.wire.connection import Answer

_SHOWN_BYTES = 200


def refusal(answer: Answer) -> str:
    """One line for an answer that is not a 200: its status, and the message of its envelope."""
    try:
        message = orjson.loads(answer.body)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = answer.body[:_SHOWN_BYTES].decode("utf-8", "replace")
    elsewhere = answer.headers.get("location")
    to = f" (location: {elsewhere})" if elsewhere is not None else ""
    return f"status {answer.status}{to}: {one_line(message)}"


def error_message(error: object) -> str:
    """One line for the `error` member of an event: its message, or all of it."""
    return one_line(error.get("message", error) if isinstance(error, dict) else error)


def one_line(text: object) -> str:
    """Without line breaks and runs of spaces."""
    return " ".join(str(text).split())
