"""A model as the gateway serves it: its text side, and the replica that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Literal

from engine.chat_template import ChatTemplate
from engine.errors import TemplateError
from engine.tokenizer import Tokenizer
from gateway.dispatch.router import Router
from gateway.replica import Replica

_PROBE = "probe"


@dataclass(frozen=True)
class ServedModel:
    """One model under the name that clients ask for, run by the replicas of `router`.

    `fingerprint` is the checkpoint's (hex), `created` a Unix time in seconds.
    `generation_defaults` are the checkpoint's own sampling values (temperature, top_p, top_k,
    min_p, repetition_penalty), used where a request leaves them out. `max_sequences` is how many
    sequences a replica takes at once, running and waiting (None: any number). Its KV is kept in
    blocks of `kv_block_tokens` tokens, `kv_block_bytes` each.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_context: int
    router: Router[Replica]
    fingerprint: str
    created: int
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    max_sequences: int | None = None
    kv_block_tokens: int = 16
    kv_block_bytes: int = 0

    @property
    def runs_elsewhere(self) -> Literal[False]:
        """Tells it from a remote model."""
        return False

    @property
    def replicas(self) -> list[Replica]:
        """All of them, whatever their condition."""
        return [member.replica for member in self.router.members]

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.tokenizer.vocab_size

    @cached_property
    def shows_tool_calls(self) -> bool:
        """Whether the chat template puts an assistant's tool calls into the prompt."""
        call = {"id": _PROBE, "type": "function", "function": {"name": _PROBE, "arguments": {}}}
        return self._shows_probe({"role": "assistant", "content": "", "tool_calls": [call]})

    @cached_property
    def shows_tool_results(self) -> bool:
        """Whether the chat template puts a tool's answer into the prompt."""
        return self._shows_probe({"role": "tool", "content": _PROBE, "tool_call_id": "t"})

    def _shows_probe(self, turn: dict[str, object]) -> bool:
        """Try it: no reading of a template's source is as reliable."""
        if self.chat_template is None:
            return False
        user: dict[str, object] = {"role": "user", "content": "x"}
        try:
            ids = self.chat_template.encode([user, turn, user], now=datetime.now(UTC))
        except TemplateError:
            return False
        return _PROBE in self.tokenizer.decode(ids)
