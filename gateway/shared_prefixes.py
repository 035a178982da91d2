"""Prefixes that the operator shares with every tenant, found at the beginning of a prompt.

Their blocks lie in a chain of their own that every tenant may read. What is in it is the operator's
text, so a tenant learns from a hit only that somebody used what all may use; where a prompt goes on
with anything else, its own chain begins.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

import structlog

from cache.hashing import CHAIN_BLOCK_TOKENS, shared_root
from engine.errors import TemplateError
from engine.request import SharedPrefix
from gateway.served_model import ServedModel
from gateway.settings_cache import SharedPrefixSettings
from gateway.token_prefix import TOKEN_BYTES, as_bytes, common_tokens
from gateway.wire.messages import TEMPLATE_ROLES, Message

_log = structlog.get_logger("forebay.shared_prefixes")

_BLOCK_BYTES = CHAIN_BLOCK_TOKENS * TOKEN_BYTES
_NEXT_TURN: Message = {"role": "user", "content": ""}


class PrefixIndex:
    """One model's shared prefixes. Finding costs microseconds, however many there are."""

    def __init__(self, root: bytes, prefixes: Iterable[Sequence[int]]) -> None:
        """`root` begins their chain, `prefixes` are their token ids; what fills no whole block of
        16 tokens is not shared."""
        whole = {_whole_blocks(as_bytes(ids)) for ids in prefixes} - {b""}
        self._root = root
        self._sorted = sorted(whole)
        self._first_blocks = frozenset(prefix[:_BLOCK_BYTES] for prefix in whole)
        self._longest = max(map(len, whole), default=0) // TOKEN_BYTES

    def __len__(self) -> int:
        return len(self._sorted)

    def find(self, token_ids: Sequence[int]) -> SharedPrefix | None:
        """The longest beginning that a prompt shares with any of them, in whole blocks."""
        if as_bytes(token_ids[:CHAIN_BLOCK_TOKENS]) not in self._first_blocks:
            return None
        prompt = as_bytes(token_ids[: self._longest])
        # whichever agrees with the prompt furthest stands next to where the prompt would stand
        at = bisect_left(self._sorted, prompt)
        tokens = max(
            common_tokens(prompt, prefix) for prefix in self._sorted[max(at - 1, 0) : at + 1]
        )
        return SharedPrefix(self._root, tokens - tokens % CHAIN_BLOCK_TOKENS)


@dataclass(slots=True)
class _Prepared:
    """An index in the making or made, and what it was made of."""

    declared: Sequence[SharedPrefixSettings]
    day: date
    index: asyncio.Future[PrefixIndex]

    def is_of(self, declared: Sequence[SharedPrefixSettings], day: date) -> bool:
        """Whether it is what these prefixes make on this day."""
        return self.day == day and (self.declared is declared or self.declared == declared)


class SharedPrefixes:
    """The index of every model, made when it is first asked for and again after a reload.

    A template may print the date, so that an index lasts a day (in UTC). Belongs to one event loop.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._prepared: dict[str, _Prepared] = {}

    async def of(
        self, model: ServedModel, declared: Sequence[SharedPrefixSettings]
    ) -> PrefixIndex | None:
        """The model's index of the `declared` prefixes; None where there is none.

        Whoever asks first waits until the prefixes are tokenized, on a thread, and everybody who
        asks meanwhile with them.
        """
        if not declared:
            return None
        now = datetime.now(UTC)
        prepared = self._prepared.get(model.name)
        if prepared is None or not prepared.is_of(declared, now.date()):
            making = asyncio.ensure_future(
                asyncio.to_thread(build_index, self._secret, model, declared, now)
            )
            prepared = self._prepared[model.name] = _Prepared(declared, now.date(), making)
        # a reload that changed none of them: not to be compared word by word ever again
        prepared.declared = declared
        if not prepared.index.done():
            # shielded: the one who asked first may leave, and others wait for the same index
            return await asyncio.shield(prepared.index)
        return prepared.index.result()


def build_index(
    secret: bytes, model: ServedModel, declared: Sequence[SharedPrefixSettings], now: datetime
) -> PrefixIndex:
    """Tokenize every prefix that is for this model.

    One that the model's template refuses, or that is shorter than a block, is named in the log and
    left out.
    """
    prefixes: list[list[int]] = []
    for i, prefix in enumerate(declared):
        if not prefix.is_for(model.name):
            continue
        try:
            renderings = list(_renderings(prefix, model, now))
        except TemplateError as error:
            _log.warning(
                "shared prefix cannot be rendered", index=i, model=model.name, reason=str(error)
            )
            continue
        if max(map(len, renderings)) < CHAIN_BLOCK_TOKENS:
            _log.warning("shared prefix is shorter than a block", index=i, model=model.name)
        prefixes += renderings
    return PrefixIndex(shared_root(secret, model.tokenizer.identity), prefixes)


def _renderings(
    prefix: SharedPrefixSettings, model: ServedModel, now: datetime
) -> Iterator[list[int]]:
    """A text has one. Messages are rendered alone, and with the opening of a next turn: some
    templates show a system turn only inside the turn after it. Raises TemplateError if neither
    can be rendered."""
    if prefix.text is not None:
        yield model.tokenizer.encode_prompt(prefix.text)
        return
    template = model.chat_template
    if template is None:
        raise TemplateError("this model has no chat template")
    messages: list[Message] = [
        {"role": TEMPLATE_ROLES[message.role], "content": message.content}
        for message in prefix.messages or ()
    ]
    refusal: TemplateError | None = None
    rendered = 0
    for conversation in (messages, [*messages, _NEXT_TURN]):
        try:
            yield template.encode(conversation, now=now, add_generation_prompt=False)
            rendered += 1
        except TemplateError as error:
            refusal = error
    if refusal is not None and not rendered:
        raise refusal


def _whole_blocks(token_bytes: bytes) -> bytes:
    return token_bytes[: len(token_bytes) - len(token_bytes) % _BLOCK_BYTES]
