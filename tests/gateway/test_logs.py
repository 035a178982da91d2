"""Logs: one shape for every logger, and no secret in any line."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from gateway.logs import Redactor, bind_request_id, configure_logging

KNOWN = "operator-secret-1234"


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """What a test configures is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    for name in ("uvicorn.access", "uvicorn.error", "httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).propagate = True


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_from_structlog_and_the_standard_library() -> None:
    stream = io.StringIO()
    configure_logging("auto", "info", stream=stream)  # not a terminal: JSON
    bind_request_id("req-1")
    structlog.get_logger("forebay.x").info("hello", tokens=3)
    logging.getLogger("uvicorn.error").warning("odd %s", "thing")
    logging.getLogger("uvicorn.access").info("never shown")
    structlog.get_logger("forebay.x").debug("too quiet")
    first, second = lines(stream)
    assert (first["message"], first["tokens"], first["request_id"]) == ("hello", 3, "req-1")
    assert (first["level"], first["logger"]) == ("info", "forebay.x")
    assert first["timestamp"].endswith("Z")
    assert (second["message"], second["logger"]) == ("odd thing", "uvicorn.error")


def test_lines_go_to_whatever_standard_error_is(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("json", "info")
    replaced = io.StringIO()
    monkeypatch.setattr("sys.stderr", replaced)
    structlog.get_logger("forebay.x").info("hello")
    assert [line["message"] for line in lines(replaced)] == ["hello"]


def test_console_lines_leave_out_what_has_no_value() -> None:
    stream = io.StringIO()
    configure_logging("console", "info", stream=stream)
    structlog.get_logger("forebay.x").info("request", tenant="acme", model=None, e2e_ms=0)
    assert "tenant=acme e2e_ms=0" in stream.getvalue()
    assert "model" not in stream.getvalue()


def test_console_lines_are_for_people() -> None:
    stream = io.StringIO()
    configure_logging("console", "debug", stream=stream)
    structlog.get_logger("forebay.x").debug("hello", tokens=3)
    assert "hello" in stream.getvalue()
    assert "tokens=3" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_secret_reaches_a_line(log_format: Any) -> None:
    stream = io.StringIO()
    configure_logging(log_format, "debug", secrets=[KNOWN], stream=stream)
    log = structlog.get_logger("forebay.x")
    log.info("a", authorization="Token wrongkey-1", headers={"Authorization": "Bearer wrongkey-2"})
    log.info(f"text with {KNOWN} inside", nested=[("x", {"y": KNOWN}), KNOWN.encode()])
    log.info("Authorization: Bearer wrongkey-3, and Basic wrongkey-4")
    logging.getLogger("other").warning("key %s", "sk-forebay-wrongkey5")
    try:
        raise ValueError("bad header: Bearer wrongkey-6")
    except ValueError:
        log.exception("failed")
    written = stream.getvalue()
    assert "failed" in written
    assert "ValueError" in written
    assert "wrongkey" not in written
    assert KNOWN not in written


def test_the_redactor_leaves_ordinary_values_alone() -> None:
    event = {
        "event": "bearing the task-force risk",
        "tokens": 3,
        "rate": 0.5,
        "ok": True,
        "x": None,
    }
    assert Redactor(["abc"])(None, "info", dict(event)) == event  # "abc" is too short to mask


def test_a_lone_surrogate_does_not_break_a_line() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream=stream)
    structlog.get_logger("forebay.x").info("odd", value="\ud83d", other={"\udc00": 1})
    assert lines(stream)[0]["message"] == "odd"


def test_what_was_harmless_once_is_still_looked_at_under_a_secret_key() -> None:
    redactor = Redactor([KNOWN])
    assert redactor(None, "info", {"tenant": "acme"}) == {"tenant": "acme"}
    masked = redactor(None, "info", {"tenant": "acme", "api_key": "acme", "Cookie": 7})
    assert masked == {"tenant": "acme", "api_key": "[redacted]", "Cookie": "[redacted]"}


def test_the_redactor_remembers_a_bounded_number_of_texts_and_no_secret() -> None:
    redactor = Redactor([KNOWN])
    for number in range(5000):
        redactor.text(f"req-{number}")
    for _ in range(2):
        assert redactor.text(f"a {KNOWN}") == "a [redacted]"
        assert redactor.text("sk-forebay-wrongkey") == "[redacted]"
    assert len(redactor._harmless) <= 1024
    assert not any(KNOWN in text or "wrongkey" in text for text in redactor._harmless)


def test_a_log_that_nobody_reads_any_more_ends_nothing() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream=stream)
    log = structlog.get_logger("forebay.x")
    log.info("first")
    assert len(lines(stream)) == 1
    stream.close()
    log.info("second")
