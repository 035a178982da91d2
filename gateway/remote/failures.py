"""What can become of a request at a remote server other than an answer, and whose fault that is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

import orjson

from gateway.errors import ApiError

ERROR_BODY_BYTES = 64 << 10
_LONGEST_MESSAGE = 2000
_LONGEST_RETRY_S = 3600
_CLIENTS_OWN = frozenset({400, 409, 413, 415, 416, 422, 451})
_MISCONFIGURED = frozenset({401, 402, 403, 404, 405, 407, 426})
_FULL_RETRY_S = 1
_COMING_AND_GOING = frozenset({"draining", "loading"})
"""A forebay's words for why it takes no request at all just now."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]+")
_ADDRESS = re.compile(
    # bounded, or a long word would be looked through from each of its letters on
    r"(?:(?<![a-zA-Z])[a-zA-Z][a-zA-Z0-9+.-]{0,15})?://\S+"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b"
    r"|\[[0-9a-fA-F:]{2,45}\](?::\d{1,5})?"
)
_KEY = re.compile(r"(?i:\bbearer\s+\S+)|\bsk-[A-Za-z0-9_*.-]{4,}")
_WORD = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class LossKind(StrEnum):
    """How a server lost a request; the words are for logs, metrics and receipts."""

    REFUSED = "connection refused"
    RESET = "connection lost"
    STALLED = "stalled"
    DOWN = "replica down"
    GARBAGE = "unreadable answer"
    SERVER_ERROR = "server error"
    ENDED_EARLY = "answer ended early"
    NO_FILES = "no open files left here"


class UpstreamLost(Exception):
    """The server did not answer, or stopped answering: another may. `status` is the server error
    that it answered with, if it did."""

    def __init__(self, kind: LossKind, detail: str = "", *, status: int | None = None) -> None:
        super().__init__(f"{kind}: {detail}" if detail else str(kind))
        self.kind = kind
        self.status = status


class UpstreamFull(Exception):
    """The server has no room now; it is well."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("full")
        self.retry_after_s = retry_after_s


class UpstreamAway(Exception):
    """The server is about to stop, or not up yet, and says so: it takes nothing from anybody."""

    def __init__(self, why: str) -> None:
        super().__init__(why)


class UpstreamMisconfigured(Exception):
    """The server does not know us, or not what we ask for: a mistake in our configuration."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answers {status}")
        self.status = status


class Cleaner:
    """Takes out of a server's words what its client must not learn: where it is and who we are
    there."""

    def __init__(
        self, *, secrets: Iterable[str], hosts: Iterable[str], served_model: str, model: str
    ) -> None:
        # a host may be called like a part of any other word; a key is hidden wherever it is
        words = [re.escape(key) for key in secrets if key]
        words += [rf"(?<![\w-]){re.escape(host)}(?![\w-])" for host in hosts if host]
        self._hidden = re.compile("|".join(words) or r"(?!)")
        self._served_model = re.compile(rf"(?<![\w-]){re.escape(served_model)}(?![\w-])")
        self._model = model

    def text(self, message: str) -> str:
        """At most 2,000 characters of it, without control characters, addresses and keys."""
        message = _CONTROL.sub(" ", message[:ERROR_BODY_BYTES])
        for pattern in (self._hidden, _ADDRESS, _KEY):
            message = pattern.sub("[hidden]", message)
        message = self._served_model.sub(lambda _: self._model, message)
        return message[:_LONGEST_MESSAGE].strip()


def answer_too_long() -> ApiError:
    """The exception that more than the gateway takes means. Another server would most likely say as
    much: it is not asked, and nobody is to blame."""
    return ApiError(
        502,
        "The model's server answered with more than this gateway takes.",
        type="server_error",
        code="upstream_error",
    )


def judge(status: int, retry_after: str | None, body: bytes, cleaner: Cleaner) -> Exception:
    """The exception that an answer other than 200 means: ApiError if the client's own mistake."""
    return _judged(status, retry_after, _error_of(body), cleaner)


def judge_event(error: object, cleaner: Cleaner) -> Exception:
    """The exception that an error under a status of 200 means: in a stream, or for an answer."""
    status = error.get("code") if isinstance(error, dict) else None
    if isinstance(status, str) and status.isascii() and status.isdigit() and len(status) == 3:
        status = int(status)
    if type(status) is int and 400 <= status < 500:
        return _judged(status, None, _error_in(error), cleaner)
    return UpstreamLost(LossKind.SERVER_ERROR, "an error for an answer")


def _judged(
    status: int, retry_after: str | None, error: dict[str, object], cleaner: Cleaner
) -> Exception:
    if status in _CLIENTS_OWN:
        return _refusal(status, error, cleaner)
    if status in _MISCONFIGURED or status < 400:
        return UpstreamMisconfigured(status)
    if status == 503 and (why := _word(error.get("code"))) in _COMING_AND_GOING:
        return UpstreamAway(str(why))
    if status == 429 or (status == 503 and retry_after is not None):
        return UpstreamFull(_seconds(retry_after))
    if status < 500 and status not in (408, 421, 425):
        return _refusal(status, error, cleaner)
    return UpstreamLost(LossKind.SERVER_ERROR, f"status {status}", status=status)


def _refusal(status: int, error: dict[str, object], cleaner: Cleaner) -> ApiError:
    message = error.get("message")
    text = cleaner.text(message) if isinstance(message, str) else ""
    param = error.get("param")
    return ApiError(
        status,
        text or "The model's server refuses this request.",
        type=_word(error.get("type")) or "invalid_request_error",
        param=cleaner.text(param)[:200] if isinstance(param, str) else None,
        code=_word(error.get("code")),
    )


def _error_of(body: bytes) -> dict[str, object]:
    """The error's fields, of the shapes that servers have for it: OpenAI's envelope, the same
    without an envelope, FastAPI's `detail`."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return _error_in(value.get("error", value)) if isinstance(value, dict) else {}


def _error_in(error: object) -> dict[str, object]:
    """What stands in the envelope's place for it."""
    if isinstance(error, str):
        return {"message": error}
    if not isinstance(error, dict):
        return {}
    if "message" not in error and isinstance(error.get("detail"), str):
        return {"message": error["detail"]}
    return error


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else None


def _seconds(retry_after: str | None) -> int:
    """Whole seconds; a date or nonsense counts as a second."""
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return max(1, min(int(text), _LONGEST_RETRY_S))
    return _FULL_RETRY_S
