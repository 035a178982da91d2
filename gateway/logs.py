"""Structured logs: JSON for machines, a console rendering for people, and no secrets in either.

Everything goes to one stream through one chain, the standard library's loggers (uvicorn's among
them) included, so that the redactor sees every line. Prompt text is never handed to a logger.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, Literal, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

_MASK = "[redacted]"
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

    def __call__(
        self, _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """The event with its secrets masked."""
        return {key: self._value(key, value) for key, value in event.items()}

    def text(self, text: str) -> str:
        """A text with its secrets masked, and lone surrogates, which no encoding takes, escaped."""
        text = text.encode("utf-8", "backslashreplace").decode()
        if self._known is not None:
            text = self._known.sub(_MASK, text)
        return _SECRET_SHAPES.sub(_masked, text)

    def _value(self, key: object, value: Any) -> Any:
        if isinstance(key, str) and key.lower() in _SECRET_KEYS:
            return _MASK
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
        if value is None or isinstance(value, int | float):
            return value
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
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    rendering: list[Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        # To text before the redactor, since a traceback can quote what it choked on.
        structlog.processors.format_exc_info,
        Redactor(secrets),
    ]
    if as_json:
        rendering += [
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(serializer=_to_json),
        ]
    else:
        rendering += [
            _without_nothing,
            structlog.dev.ConsoleRenderer(colors=on_terminal, sort_keys=False),
        ]
    handler = _StandardError() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_without_color_message, *shared], processors=rendering
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
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at that moment: a progress bar takes its place for a while, to
    keep lines from being written into the bar."""

    @property
    def stream(self) -> TextIO:
        """The current standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, _given: TextIO) -> None:
        """The base class sets it once; here it is looked up instead."""


def bind_request_id(request_id: str) -> None:
    """Every line logged from this task on carries the request id."""
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request_id)


def _to_json(event: Any, **_: Any) -> str:
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
