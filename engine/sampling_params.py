"""What a request asks of the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_REPETITION_PENALTY = 0.01
"""Logits are divided by it; far smaller ones would make them infinite."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose one sequence's tokens. Already validated by whoever built it.

    Order of effects, as the field applies them: logit_bias and bans, then repetition, frequency
    and presence penalties, then temperature (0 means greedy), then top_k (0 means off), top_p,
    min_p. Penalties count generated tokens; the repetition penalty counts prompt tokens too.
    `seed` and `choice_index` and the position determine every draw. `logprobs` is how many
    alternatives to report beside the chosen token (None: report nothing); they are log-softmax of
    the raw logits. `max_tokens` counts generated tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    choice_index: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def plain_greedy(self) -> bool:
        """Greedy with nothing that changes or reads the logits: an argmax is the whole job."""
        return (
            self.greedy
            and self.logprobs is None
            and not self.logit_bias
            and self.frequency_penalty == 0.0
            and self.presence_penalty == 0.0
            and self.repetition_penalty == 1.0
        )
