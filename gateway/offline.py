"""Calls that no connection brings: the lines of a batch, answered as if a client had sent them."""

from __future__ import annotations

import asyncio
from secrets import token_hex

import orjson
import structlog
from starlette.types import Message

from gateway.batches.line_answer import LineAnswer
from gateway.endpoints import CHAT, COMPLETIONS
from gateway.errors import ApiError, bad_request, internal_error
from gateway.http_call import HttpCall
from gateway.journey import Journey
from gateway.lifecycle import Lifecycle
from gateway.logs import bind_request_id
from gateway.tenants import Caller

_log = structlog.get_logger("forebay.batch")

_ENDPOINTS = {f"/v1{endpoint.path}": endpoint for endpoint in (CHAT, COMPLETIONS)}


class OfflineCalls:
    """Runs lines of batches through the journey of every other request."""

    def __init__(self, journey: Journey, lifecycle: Lifecycle) -> None:
        """What runs here is owed an answer like what came over a connection, by `lifecycle`."""
        self._journey = journey
        self._lifecycle = lifecycle

    async def run(
        self,
        caller: Caller,
        endpoint_path: str,
        body: dict[str, object],
        *,
        batch_id: str,
        line_id: str,
    ) -> LineAnswer:
        """Answer one line; never raises but for being cancelled. `line_id` begins its request's
        id, so that the log can be searched for it."""
        request_id = f"{line_id}-{token_hex(4)}"
        bind_request_id(request_id)
        answer = _Answer()
        call = _call(endpoint_path, orjson.dumps(body), request_id, answer)
        try:
            endpoint = _ENDPOINTS.get(endpoint_path)
            if endpoint is None:
                raise bad_request("The endpoint is none that batches can use.", param="url")
            with self._lifecycle.request():
                await self._journey.run_line(call, endpoint, caller, batch_id)
        except ApiError as error:
            if not call.response_started:
                await call.answer_error(error)
        except Exception:  # noqa: BLE001 - one line's fault must not end the others
            _log.exception("a batch's line failed", batch=batch_id, line=line_id)
            if not call.response_started:
                await call.answer_error(internal_error(request_id))
        return answer.as_line(request_id)


class _Answer:
    """Takes the place of a connection."""

    def __init__(self) -> None:
        self._status = 500
        self._retry_after_s: float | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            for name, value in message["headers"]:
                if name == b"retry-after" and value.isdigit():
                    self._retry_after_s = float(value)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    def as_line(self, request_id: str) -> LineAnswer:
        try:
            body = orjson.loads(self._body)
        except orjson.JSONDecodeError:
            body = internal_error(request_id).envelope()
        return LineAnswer(self._status, body, request_id, self._retry_after_s)


def _call(path: str, body: bytes, request_id: str, answer: _Answer) -> HttpCall:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        # the client never leaves
        await asyncio.Event().wait()
        raise AssertionError

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "state": {"request_id": request_id},
    }
    return HttpCall(scope, receive, answer.send)
