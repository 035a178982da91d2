"""POST /tokenize and /detokenize: the model's own view of a text."""

from __future__ import annotations

import asyncio

from gateway.errors import bad_request
from gateway.http_body import read_body
from gateway.http_call import HttpCall
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.prompts import encode_conversation, encode_text, require_known_tokens
from gateway.reload import RuntimeConfig
from gateway.request import Request
from gateway.served_model import ServedModel
from gateway.settlement import settled
from gateway.wire.fields import Fields, as_token_ids
from gateway.wire.json_body import parse_object
from gateway.wire.messages import read_messages

_LONG_TOKENS = 8 << 10
"""Where decoding costs more than handing it to a thread."""


class Tokenizing:
    """Answers both; no engine is involved and no limit is charged."""

    def __init__(self, runtime: RuntimeConfig, models: Models, metrics: Metrics) -> None:
        self._runtime = runtime
        self._models = models
        self._metrics = metrics

    async def tokenize(self, call: HttpCall) -> None:
        """`prompt` as completions would read it, or `messages` as chat would."""
        request = Request(call, "tokenize", self._runtime.current)
        with settled(request, self._metrics):
            fields, model = await self._read(request)
            ids = await _encode(fields, model)
            await call.answer_json(
                {"count": len(ids), "max_model_len": model.max_context, "tokens": ids}
            )

    async def detokenize(self, call: HttpCall) -> None:
        """`tokens` back to text, control tokens included."""
        request = Request(call, "detokenize", self._runtime.current)
        with settled(request, self._metrics):
            fields, model = await self._read(request)
            ids = _read_tokens(fields, model)
            if len(ids) > _LONG_TOKENS:
                text = await asyncio.to_thread(model.tokenizer.decode, ids, skip_special=False)
            else:
                text = model.tokenizer.decode(ids, skip_special=False)
            await call.answer_json({"prompt": text})

    async def _read(self, request: Request) -> tuple[Fields, ServedModel]:
        tenant = request.authenticate()
        body = await read_body(request.call, request.snapshot.settings.server.body_limit)
        # it may have taken as long to come as its client liked
        self._runtime.current.key_ring.require(request.caller)
        fields = Fields(parse_object(body))
        model = self._models.find_served(fields.required_string("model"), tenant)
        request.model = model
        return fields, model


async def _encode(fields: Fields, model: ServedModel) -> list[int]:
    prompt = fields.string("prompt")
    if (prompt is None) == (fields.value("messages") is None):
        raise bad_request("Send either prompt or messages.", param="prompt")
    if prompt is not None:
        return await encode_text(prompt, model)
    opens_answer = fields.boolean("add_generation_prompt") is not False
    encoded = await encode_conversation(
        read_messages(fields), model, add_generation_prompt=opens_answer
    )
    return encoded.token_ids


def _read_tokens(fields: Fields, model: ServedModel) -> list[int]:
    values = fields.array("tokens")
    if values is None:
        raise fields.wrong("tokens", "is required and must be an array of token ids.")
    ids = as_token_ids(values)
    if ids is None:
        raise fields.wrong("tokens", "must hold only token ids.")
    require_known_tokens(ids, model, "tokens")
    return ids
