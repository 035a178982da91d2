"""A model as the gateway serves it from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer
from gateway.dispatch.router import Router
from gateway.remote.isolation import Isolation
from gateway.remote.replica import RemoteReplica

TEXT_IDENTITY = hashlib.sha256(b"forebay/text-blocks/1").hexdigest()
"""Stands for a tokenizer where there is none, and prefixes are followed by their text."""


@dataclass(frozen=True)
class RemoteModel:
    """One model under the name that clients ask for, on servers that speak OpenAI's API.

    `tokenizer` is the model's, None if the operator named none; `chat_template` None: its chats are
    followed by their text. `created` is a Unix time in seconds, `max_context` tokens if the
    operator said so.
    """

    name: str
    router: Router[RemoteReplica]
    isolation: Isolation
    created: int
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    max_context: int | None = None

    @property
    def runs_elsewhere(self) -> Literal[True]:
        """Tells it from a `ServedModel`."""
        return True


def make_remote_model(
    name: str,
    router: Router[RemoteReplica],
    secret: bytes,
    created: int,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | None = None,
    max_context: int | None = None,
) -> RemoteModel:
    """The model with its tenants kept apart under the server's secret: chains of token blocks where
    there is a tokenizer, of text blocks where there is none."""
    identity = TEXT_IDENTITY if tokenizer is None else tokenizer.identity
    return RemoteModel(
        name=name,
        router=router,
        isolation=Isolation(secret, identity),
        created=created,
        tokenizer=tokenizer,
        chat_template=chat_template,
        max_context=max_context,
    )
