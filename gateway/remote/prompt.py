"""What routing knows of a prompt that is tokenized elsewhere: how long it is, and its links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import orjson

from cache.hashing import CHAIN_BLOCK_TOKENS
from cache.prompt_links import prompt_links, token_bytes_of
from cache.text_chain import text_links
from engine.errors import TemplateError
from gateway.dispatch.prefix import UNKNOWN, Prefix
from gateway.errors import ApiError
from gateway.remote.body import RelayBody
from gateway.remote.model import RemoteModel
from gateway.terms import Terms
from gateway.wire.fields import Fields, as_token_ids
from gateway.wire.messages import read_messages
from policies.routing import RouteRequest

_BYTES_PER_TOKEN = 4
"""Of text, about; what blocks of text stand for."""
_FOLLOWED_BYTES = 512 << 10
"""Of a longer text the beginning is followed: blocks are hashed on the event loop."""
_DEFAULT_MAX_TOKENS = 256
_LONG_CHARACTERS = 8 << 10
"""Where tokenizing costs more than handing it to a thread."""
_SHAPES_THE_PROMPT = (
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "response_format",
    "structured_outputs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "mm_processor_kwargs",
)
"""Chats with any of these are rendered in ways that we do not know."""


class RoutedPrompt(NamedTuple):
    """`tokens` are exact if they were counted with the model's own tokenizer, else an estimate, in
    whose unit the prefix's links are too. Of several prompts they are the sum, of which those
    behind the first one are an estimate in any case."""

    tokens: int
    exact: bool
    prefix: Prefix

    def ask(self, body: RelayBody, terms: Terms) -> RouteRequest:
        """What routing goes by."""
        wanted = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return RouteRequest(
            prompt_tokens=max(1, self.tokens),
            max_tokens=max(1, wanted),
            priority=terms.priority,
            flow=terms.flow,
            weight=terms.weight,
            due_s=terms.due_s,
        )

    def in_links(self, cached_tokens: int, prompt_tokens: int | None) -> int:
        """Cached tokens as the server counts them, in the unit of the links."""
        if self.exact or not prompt_tokens:
            return cached_tokens
        return round(min(1.0, cached_tokens / prompt_tokens) * self.tokens)


async def routed_prompt(body: RelayBody, model: RemoteModel, root: bytes | None) -> RoutedPrompt:
    """The prompt under the chain that begins at `root`; None: it shares KV with nobody.

    With the model's tokenizer it is followed token by token, without it, or where it is rendered in
    unknown ways, by its text. Of several prompts the first is followed.
    """
    ids = await _token_ids(body, model)
    further = _further_tokens(body)
    if ids is not None:
        token_bytes = token_bytes_of(ids)
        links = (
            UNKNOWN
            if root is None
            else Prefix(lambda size: prompt_links(root, token_bytes, block_tokens=size))
        )
        return RoutedPrompt(len(ids) + further, True, links)
    text = canonical_text(body)
    followed = text[:_FOLLOWED_BYTES]
    prefix = UNKNOWN
    if root is not None:
        prefix = Prefix(lambda size: _of_size(text_links(root, followed), size))
    return RoutedPrompt(len(text) // _BYTES_PER_TOKEN + further, False, prefix)


def canonical_text(body: RelayBody) -> bytes:
    """The prompt's bytes: tools first, then message after message, each behind its length, so that
    a longer conversation begins with the shorter one's bytes."""
    values = body.values
    if body.endpoint == "completions":
        prompt = _first_prompt(values)
        return prompt.encode() if isinstance(prompt, str) else orjson.dumps(prompt)
    messages = values.get("messages")
    pieces = [orjson.dumps([values.get(name) for name in ("tools", "functions", "documents")])]
    if isinstance(messages, list):
        pieces += map(orjson.dumps, messages)
    return b"".join(b"%d:%b;" % (len(piece), piece) for piece in pieces)


async def _token_ids(body: RelayBody, model: RemoteModel) -> Sequence[int] | None:
    """The prompt's ids if they are known to be what the server will make of it."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    if body.endpoint == "completions":
        prompt = _first_prompt(body.values)
        if isinstance(prompt, str):
            return await _off_loop_if_long(len(prompt), lambda: tokenizer.encode_prompt(prompt))
        return _valid_ids(prompt, tokenizer.vocab_size)
    template = model.chat_template
    if template is None or any(body.values.get(name) is not None for name in _SHAPES_THE_PROMPT):
        return None
    try:
        conversation = read_messages(Fields(body.values))
    except ApiError:
        return None  # parts that we do not know: images, sound
    if conversation.tool_call_path or conversation.tool_result_path:
        return None
    messages, now = conversation.messages, datetime.now(UTC)
    try:
        return await _off_loop_if_long(
            conversation.characters(), lambda: template.encode(messages, now=now)
        )
    except TemplateError:
        return None


def _first_prompt(values: Mapping[str, object]) -> object:
    prompt = values.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


def _further_tokens(body: RelayBody) -> int:
    """About how many the prompts behind the first one have."""
    prompt = body.values.get("prompt") if body.endpoint == "completions" else None
    if not isinstance(prompt, list) or not isinstance(prompt[0], str | list):
        return 0
    return sum(
        len(each) if isinstance(each, list) else -(-len(str(each).encode()) // _BYTES_PER_TOKEN)
        for each in prompt[1:]
    )


def _valid_ids(prompt: object, vocab_size: int) -> Sequence[int] | None:
    if not isinstance(prompt, list):
        return None
    ids = as_token_ids(prompt)
    return ids if ids is not None and max(ids, default=0) < vocab_size else None


def _of_size(links: Sequence[bytes], block_tokens: int) -> Sequence[bytes]:
    """The links of larger blocks: every so many-th of the small ones'."""
    step = block_tokens // CHAIN_BLOCK_TOKENS
    return links if step == 1 else links[step - 1 :: step]


async def _off_loop_if_long(characters: int, encode: Callable[[], list[int]]) -> list[int]:
    return await asyncio.to_thread(encode) if characters > _LONG_CHARACTERS else encode()
