"""From a path to a model: a GGUF file, or a Hugging Face directory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from engine.model import Model, Progress
from engine.text_side import check_is_file, gguf_text_side, hf_text_side
from engine.weights.fingerprint import Fingerprint
from engine.weights.gguf_checkpoint import gguf_architecture, gguf_weights
from engine.weights.gguf_file import GgufFile
from engine.weights.hf_checkpoint import HfCheckpoint
from engine.weights.stored import read_weights


def load_model(
    path: Path, *, name: str, dtype: torch.dtype, progress: Progress | None = None
) -> Model:
    """Read a checkpoint whole: weights as CPU tensors of `dtype`, tokenizer, template, identity.

    `path` is a `.gguf` file or a directory with `config.json`, `*.safetensors` and
    `tokenizer.json`. `progress` is called on this thread. Raises ModelLoadError (one line, naming
    the file) for anything missing, truncated or contradictory, and UnsupportedArchitectureError
    for a decoder that cannot be expressed; nothing stays open or running afterwards.
    """
    if path.is_dir():
        return _load_directory(path, name, dtype, progress)
    check_is_file(path)
    return _load_gguf(path, name, dtype, progress)


def _load_gguf(path: Path, name: str, dtype: torch.dtype, progress: Progress | None) -> Model:
    with GgufFile(path) as file:
        architecture = gguf_architecture(file)
        stored = gguf_weights(file, architecture)
        with Fingerprint([path]) as fingerprint:
            text = gguf_text_side(file, name)
            weights = read_weights(stored, dtype, progress)
            return Model(
                name=name,
                architecture=architecture,
                weights=weights,
                tokenizer=text.tokenizer,
                chat_template=text.chat_template,
                eos_token_ids=text.eos_token_ids,
                fingerprint=fingerprint.result(progress),
            )


def _load_directory(path: Path, name: str, dtype: torch.dtype, progress: Progress | None) -> Model:
    checkpoint = HfCheckpoint(path)
    with ExitStack() as shards, Fingerprint(checkpoint.identity_files()) as fingerprint:
        stored = checkpoint.stored_weights(shards)
        text = hf_text_side(checkpoint.text, name)
        weights = read_weights(stored, dtype, progress)
        return Model(
            name=name,
            architecture=checkpoint.architecture,
            weights=weights,
            tokenizer=text.tokenizer,
            chat_template=text.chat_template,
            eos_token_ids=text.eos_token_ids,
            fingerprint=fingerprint.result(progress),
            generation_defaults=text.generation_defaults,
        )
