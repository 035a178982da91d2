"""Structured logs: JSON for machines, a console rendering for people, and no secrets in either.

Everything goes to one stream and through one redactor, the standard library's loggers (uvicorn's
among them) included. Our own lines, one for every request among them, do not take the way through
that library, which costs more than making them. Prompt text is never handed to a logger.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

_stack_info = structlog.processors.StackInfoRenderer(additional_ignores=[__name__])

_MASK = "[redacted]"
_REMEMBERED_TEXTS = 1024
_REMEMBERED_CHARACTERS = 64
_SECRET_KEYS = frozenset(
    {"authorization", "proxy-authorization", "api_key", "api-key", "x-api-key", "cookie", "secret"}
)
_SECRET_SHAPES = re.compile(
    r"(?i:\b(?P<scheme>bearer|basic)\s+)[^\s\"',;]+"  # an Authorization header's value
    r"|\bsk-[A-Za-z0-9_-]{8,}"  # what API keys look like, ours too
)


class Redactor:
    """A structlog processor that masks whatever looks like a key, and every secret it is told."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """`secrets` are known in the clear. Very short ones are left alone: masking "a" everywhere
        would hide the log and, by where the masks are, show the secret."""
        known = sorted({secret for secret in secrets if len(secret) >= 6}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None
        # most values come in line after line: names of tenants, models, loggers; so do the names
        # of fields, which are our own
        self._harmless: set[str] = set()
        self._tell: set[str] = set()

    def __call__(
        self, _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """The event with its secrets masked."""
        harmless, tell = self._harmless, self._tell
        masked: dict[str, Any] = {}
        for key, value in event.items():
            kind = type(value)
            # most of a line's values need no closer look
            if key in tell and (
                (kind is str and value in harmless)
                or value is None
                or kind is int
                or kind is float
                or kind is bool
            ):
                masked[key] = value
            else:
                masked[key] = self._value(key, value)
                self._note(key)
        return masked

    def _note(self, key: object) -> None:
        """Remember a field's name that says nothing secret."""
        if type(key) is str and key.lower() not in _SECRET_KEYS and key not in self._tell:
            if len(self._tell) >= _REMEMBERED_TEXTS:
                self._tell.clear()
            self._tell.add(key)

    def text(self, text: str) -> str:
        """A text with its secrets masked, and lone surrogates, which no encoding takes, escaped."""
        if text in self._harmless:
            return text
        masked = text.encode("utf-8", "backslashreplace").decode()
        if self._known is not None:
            masked = self._known.sub(_MASK, masked)
        masked = _SECRET_SHAPES.sub(_masked, masked)
        if masked == text and len(text) <= _REMEMBERED_CHARACTERS:
            if len(self._harmless) >= _REMEMBERED_TEXTS:
                self._harmless.clear()
            self._harmless.add(text)
        return masked

    def _value(self, key: object, value: Any) -> Any:
        if isinstance(key, str) and key.lower() in _SECRET_KEYS:
            return _MASK
        if value is None or isinstance(value, int | float):
            return value
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {
                self._value(None, name): self._value(name, item) for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value(None, item) for item in value]
        return self.text(str(value))


def configure_logging(
    log_format: LogFormat,
    level: LogLevel,
    *,
    secrets: Iterable[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Route structlog and the standard library to `stream` (standard error if None).

    `auto` is the console rendering on a terminal and JSON elsewhere. May be called again: the last
    call counts.
    """
    on_terminal = (sys.stderr if stream is None else stream).isatty()
    as_json = log_format == "json" or (log_format == "auto" and not on_terminal)
    described: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
    ]
    redactor = Redactor(secrets)
    rendering: list[Processor] = [
        _stack_info,
        # To text before the redactor, since a traceback can quote what it choked on.
        structlog.processors.format_exc_info,
        redactor,
    ]
    if as_json:
        rendering.append(_as_json)
    else:
        rendering += [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _without_nothing,
            structlog.dev.ConsoleRenderer(colors=on_terminal, sort_keys=False),
        ]
    handler = _Lines(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_without_color_message, *described],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
    # One line per request comes from the gateway itself; uvicorn tells of errors only.
    logging.getLogger("uvicorn.access").propagate = False
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    for name in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[_AtOnce(redactor)] if as_json else [*described, *rendering],
        logger_factory=lambda name="": _OwnLogger(name, handler),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )


class _Lines(logging.StreamHandler[TextIO]):
    """Writes to one stream; to what `sys.stderr` is at that moment if none is given: a progress bar
    takes its place for a while, to keep lines from being written into the bar."""

    def __init__(self, stream: TextIO | None) -> None:
        self._given = stream
        super().__init__(stream)

    @property
    def stream(self) -> TextIO:
        """The given one, else the current standard error."""
        return sys.stderr if self._given is None else self._given

    @stream.setter
    def stream(self, _given: TextIO) -> None:
        """The base class sets it once; here it is looked up instead."""

    def write_line(self, line: str) -> None:
        """One line of our own, whole, whichever thread it is from."""
        self.acquire()
        try:
            # a log that nobody reads any more must not end what is being logged
            with suppress(OSError, ValueError):
                self.stream.write(line + self.terminator)
                self.stream.flush()
        finally:
            self.release()


class _OwnLogger:
    """What structlog hands finished lines to, by level."""

    __slots__ = ("critical", "debug", "error", "info", "name", "warning")

    def __init__(self, name: str, handler: _Lines) -> None:
        self.name = name
        self.debug = self.info = self.warning = self.error = self.critical = handler.write_line


def bind_request_id(request_id: str) -> None:
    """Every line logged from this task on carries the request id."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


class _AtOnce:
    """What the processors above do to a line of ours that becomes JSON, in one call: nine of them
    for every request took longer than what they did."""

    __slots__ = ("_redactor",)

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def __call__(self, logger: Any, method: str, event: EventDict) -> str:
        for name, value in structlog.contextvars.get_contextvars().items():
            event.setdefault(name, value)
        event["logger"] = logger.name
        event["level"] = method
        if "stack_info" in event or "exc_info" in event:
            event = _stack_info(logger, method, event)
            event = structlog.processors.format_exc_info(logger, method, event)
        return _as_json(logger, method, self._redactor(logger, method, event))


def _as_json(_logger: Any, _method: str, event: EventDict) -> str:
    """One line, with the time in front of the message."""
    message = event.pop("event", None)
    event["timestamp"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    event["message"] = message
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _masked(match: re.Match[str]) -> str:
    scheme = match.group("scheme")
    return f"{scheme} {_MASK}" if scheme else _MASK


def _without_nothing(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """What has no value is left out for people; machines get every field of a line."""
    return {key: value for key, value in event.items() if value is not None}


def _without_color_message(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """uvicorn repeats its message with terminal colours."""
    event.pop("color_message", None)
    return event
