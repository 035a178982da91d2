"""What the gateway knows of an engine besides its outputs, wherever the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.report import Peaks
from policies.cost import Coefficients


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Fixed for one life of an engine.

    `fingerprint` is the checkpoint's (hex), `generation_defaults` its own sampling values.
    `cache_identity` names the numbers that its pages hold: 32 bytes, equal where KV can be
    exchanged. The pool has `blocks` pages of `block_tokens` tokens and `block_bytes` bytes. `cost`
    is what work takes as calibrated at start, `peaks` what the device can do at best, None where
    that was not measured.
    """

    executor: str
    device: str
    dtype: str
    fingerprint: str
    cache_identity: bytes
    generation_defaults: Mapping[str, float]
    max_context: int
    step_tokens: int
    block_tokens: int
    block_bytes: int
    blocks: int
    cost: Coefficients
    peaks: Peaks | None = None

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV the device pool holds."""
        return self.blocks * self.block_tokens
