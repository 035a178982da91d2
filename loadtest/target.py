"""The server that is measured."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.vocabulary import DEFAULT_VOCABULARY, Vocabulary
from loadtest.wire.connection import Endpoint


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure: what tables call it, where it is and which of its models to ask."""

    name: str
    endpoint: Endpoint
    model: str
    vocabulary: Vocabulary = DEFAULT_VOCABULARY
    timeout_s: float = 300.0

    @property
    def completions_path(self) -> str:
        """The path of its completions call."""
        return f"{self.endpoint.base_path}/completions"

    @property
    def chat_path(self) -> str:
        """The path of its chat completions call."""
        return f"{self.endpoint.base_path}/chat/completions"
