"""What a turn says on the wire: only what every OpenAI-compatible server takes.

`ignore_eos` is no field of OpenAI's, but vLLM, SGLang, llama.cpp and forebay have it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from loadtest.plan import Message, Turn
from loadtest.target import Target

_ASKS_MORE = {"x-forebay-price": "include", "x-forebay-cached-tiers": "include"}
"""Whoever is no forebay passes over a header that it does not know."""


class Wording:
    """How one target is asked in the name of each tenant."""

    def __init__(self, target: Target, keys: Mapping[str, str]) -> None:
        """`keys` are those of the tenants that do not use the target's own."""
        self._target = target
        self._endpoints = {
            tenant: replace(target.endpoint, key=key) for tenant, key in keys.items()
        }

    def body(self, turn: Turn, chat: Sequence[Message]) -> bytes:
        """The JSON of a turn: a completion of its tokens, or of the chat so far, its own messages
        included. Streamed, with usage; greedy, unless its fields say otherwise."""
        body: dict[str, Any] = {"model": self._target.model}
        if turn.tokens is not None:
            body["prompt"] = _ids(turn.tokens)
        else:
            body["messages"] = chat
        body |= {
            "max_tokens": turn.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if turn.exact:
            body["ignore_eos"] = True
        return orjson.dumps(body | dict(turn.fields), option=orjson.OPT_SERIALIZE_NUMPY)

    def request(self, tenant: str, turn: Turn, body: bytes) -> bytes:
        """The bytes of the whole request."""
        target = self._target
        path = target.completions_path if turn.tokens is not None else target.chat_path
        endpoint = self._endpoints.get(tenant, target.endpoint)
        return endpoint.request("POST", path, body, _ASKS_MORE)

    def without_keys(self, text: str) -> str:
        """A server's words without any key that it may have quoted."""
        keys = {at.key for at in (self._target.endpoint, *self._endpoints.values()) if at.key}
        # The longest first: of a key that begins with another one, the rest would be left.
        for key in sorted(keys, key=len, reverse=True):
            text = text.replace(key, "[key]")
        return text


def _ids(tokens: Sequence[int]) -> Any:
    """As orjson takes them; an array as numpy sees it, without an object for each of its ids."""
    if isinstance(tokens, array) and tokens:
        return np.frombuffer(tokens, dtype=np.dtype(tokens.typecode))
    return tokens if isinstance(tokens, (list, tuple, np.ndarray)) else list(tokens)
