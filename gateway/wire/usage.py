"""What an answer cost in tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """`prompt_tokens` includes `cached_tokens`; every prompt counts once, however many choices."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def as_wire(self) -> dict[str, object]:
        """OpenAI's shape; `cached_tokens` is always an integer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
