"""A random model that is slow enough for its prompts to be worth keeping: made on the fly.

Computing a prompt takes several times as long as bringing it from any lower tier, as it does for
real models; loading the model takes a fraction of what a real one takes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from engine.tokenizer_definition import byte_letters
from tests.engine.checkpoints import byte_tokenizer_definition, write_tokenizer

_HIDDEN, _LAYERS, _HEADS, _KV_HEADS = 512, 8, 8, 2
TOKEN_KV_BYTES = 2 * _LAYERS * _KV_HEADS * (_HIDDEN // _HEADS) * 4
"""What a token's KV takes in float32."""
_GAIN = 1.2
"""Of every matrix: above one, so that an answer hangs on all of its prompt."""


def wordy_checkpoint(directory: Path, words: Sequence[str], max_positions: int) -> Path:
    """Write the model, a byte-level tokenizer that has each of `words` with a space before it as
    one token, and a template; the directory."""
    definition = byte_tokenizer_definition()
    add_words(definition, words)
    vocab_size = -(-len(definition["model"]["vocab"]) // 16) * 16
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=_HIDDEN,
        intermediate_size=5 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(17)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _GAIN * parameter.shape[1] ** -0.5, generator=generator)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    (directory / "tokenizer.json").write_text(json.dumps(definition))
    return directory


def add_words(definition: dict, words: Sequence[str]) -> None:
    """Give a byte-level definition a token for each word with a space before it."""
    letters = byte_letters()
    vocab, merges = definition["model"]["vocab"], []
    for word in words:
        spelled = [letters[byte] for byte in f" {word}".encode()]
        joined = spelled[0]
        for letter in spelled[1:]:
            if joined + letter not in vocab:
                vocab[joined + letter] = len(vocab)
                merges.append([joined, letter])
            joined += letter
    # in front of the others, which would take letters out of a word's middle
    definition["model"]["merges"][:0] = merges
