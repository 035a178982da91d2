"""A model as it comes from disk: shape, numbers, tokenizer, template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.architecture import Architecture

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called as (what, bytes done, bytes in all) while a model loads."""


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded checkpoint.

    `weights` maps the names of `engine.decoder.weight_names` to CPU tensors in the dtype that was
    asked for (norm weights float32). Executors may take entries out as they repack them, so that
    no matrix lives twice. `fingerprint` is the SHA-256 (hex) of the checkpoint's bytes and identity
    files: equal fingerprints mean equal numbers. `eos_token_ids` end a sequence.
    `chat_template` is the jinja2 source, None if the model has none.
    """

    name: str
    architecture: Architecture
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    chat_template: str | None
    eos_token_ids: frozenset[int]
    fingerprint: str
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
