"""Whether a line of a batch's input is a request that can be run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import orjson

from gateway.batches.batch import BatchError
from gateway.batches.input_lines import InputLine
from gateway.batches.line_store import NewLine
from gateway.endpoints import CHAT, COMPLETIONS, Endpoint
from gateway.errors import ApiError
from gateway.models import AnyModel, Models
from gateway.remote.body import read_body
from gateway.tenants import Tenant
from gateway.wire.fields import Fields
from gateway.wire.json_body import parse_object

ENDPOINTS: Mapping[str, Endpoint] = {
    f"/v1{endpoint.path}": endpoint for endpoint in (CHAT, COMPLETIONS)
}
"""Those that a batch's lines may be for, by their paths."""

LONGEST_CUSTOM_ID = 512
_BYTES_PER_TOKEN = 4
"""Of text as JSON: an estimate. A batch's lines are counted before they are tokenized, which would
take the time of requests that somebody waits for."""
_UNKNOWN_OUTPUT_TOKENS = 4096
"""Where neither the line nor the model says how long an answer may become."""
_MOST_TOKENS = (1 << 31) - 1
"""Of a line, whatever it asks for: sums of them must fit the database's integers."""


class LineRefused(Exception):
    """The line is wrong, and with it the batch."""

    def __init__(self, error: BatchError) -> None:
        super().__init__(error.code)
        self.error = error


class LineCheck:
    """Checks the lines of one batch, in order. Raises LineRefused."""

    def __init__(self, models: Models, tenant: Tenant, path: str) -> None:
        """`path` is the batch's endpoint."""
        self._models = models
        self._tenant = tenant
        self._path = path
        self._endpoint = ENDPOINTS[path]
        self._seen: set[bytes] = set()

    def check(self, line: InputLine) -> NewLine:
        """The request in a line, as it will be run."""
        if line.raw is None:
            raise _refused(line, "line_too_long", "This line is longer than a request may be.")
        try:
            values = parse_object(line.raw, what="line")
        except ApiError as error:
            raise _refused(line, "invalid_json_line", error.message, error.param) from None
        try:
            fields = Fields(values)
            custom_id = self._custom_id(line, fields)
            if fields.required_string("method") != "POST":
                raise fields.wrong("method", "must be POST.")
            if fields.required_string("url") != self._path:
                raise _refused(
                    line,
                    "mismatched_endpoint",
                    "url must be the endpoint that the batch was made for.",
                    "url",
                )
            body = values.get("body")
            if not isinstance(body, dict):
                raise fields.wrong("body", "is required and must be an object.")
        except ApiError as error:
            raise _refused(line, "invalid_line", error.message, error.param) from None
        try:
            tokens = self._tokens(body)
        except ApiError as error:
            param = f"body.{error.param}" if error.param else "body"
            code = error.code or "invalid_request"
            raise _refused(line, code, error.message, param) from None
        return NewLine(line.number, custom_id, orjson.dumps(body).decode(), tokens)

    def _custom_id(self, line: InputLine, fields: Fields) -> str:
        custom_id = fields.required_string("custom_id")
        if not 1 <= len(custom_id) <= LONGEST_CUSTOM_ID or "\0" in custom_id:
            raise fields.wrong("custom_id", f"must be 1 to {LONGEST_CUSTOM_ID} characters.")
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise _refused(
                line,
                "duplicate_custom_id",
                "Another line before this one has the same custom_id.",
                "custom_id",
            )
        self._seen.add(digest)
        return custom_id

    def _tokens(self, body: dict[str, object]) -> int:
        """The most tokens that this body's request may use, prompt and answers. Raises the ApiError
        that it would be refused with."""
        fields = Fields(body)
        model = self._models.find(fields.required_string("model"), self._tenant)
        if model.runs_elsewhere:
            relayed = read_body(body, self._endpoint.name)
            stream, choices, longest = relayed.stream, relayed.choices, relayed.max_tokens
        else:
            generation = self._endpoint.read(body).generation
            stream, longest = generation.stream, generation.max_tokens
            choices = generation.n * _prompts(body)
        if stream:
            raise fields.wrong("stream", "must not be true in a batch.")
        prompt = _prompt_tokens(body.get("messages" if self._endpoint is CHAT else "prompt"))
        if longest is None:
            longest = _room(model, prompt)
        return min(_MOST_TOKENS, prompt + choices * longest)


def _prompts(body: Mapping[str, object]) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def _prompt_tokens(prompt: object) -> int:
    """About how many tokens a prompt or messages have."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | int | float):
        return sum(len(each) if isinstance(each, list) else 1 for each in prompt)
    return math.ceil(len(orjson.dumps(prompt)) / _BYTES_PER_TOKEN)


def _room(model: AnyModel, prompt_tokens: int) -> int:
    if model.max_context is None:
        return _UNKNOWN_OUTPUT_TOKENS
    return max(1, model.max_context - prompt_tokens)


def _refused(line: InputLine, code: str, message: str, param: str | None = None) -> LineRefused:
    return LineRefused(BatchError(code, message, line.number, param))
