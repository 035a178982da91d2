"""A small SentencePiece-style vocabulary, as a GGUF file holds it, and a plain reading of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from engine.tokenizer import Tokenizer
from engine.tokenizer_gguf import gguf_named_tokens, gguf_tokenizer_definition

SPACE = "\u2581"
UNKNOWN, CONTROL, USER_DEFINED, BYTE, NORMAL = 2, 3, 4, 6, 1
_WORDS = (
    "th",
    "he",
    "the",
    f"{SPACE}t",
    f"{SPACE}th",
    f"{SPACE}the",
    "in",
    "ing",
    "er",
    "s>",
    "ab",
)
_LETTERS = f"abcdefghinrst<>/{SPACE}\u4e16"

VOCABULARY: list[tuple[str, float, int]] = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    ("[MARK]", 0.0, USER_DEFINED),
    *((word, -float(rank), NORMAL) for rank, word in enumerate(_WORDS)),
    *((letter, -100.0 - rank, NORMAL) for rank, letter in enumerate(_LETTERS)),
]


def spm_metadata(*, prefix_space: bool) -> dict[str, object]:
    """The `tokenizer.ggml` keys of a file with this vocabulary."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in VOCABULARY],
        "tokenizer.ggml.scores": [score for _, score, _ in VOCABULARY],
        "tokenizer.ggml.token_type": [kind for _, _, kind in VOCABULARY],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix_space,
    }


def spm_tokenizer(*, prefix_space: bool) -> Tokenizer:
    """The tokenizer of a file with this vocabulary."""
    file = SimpleNamespace(path=Path("tiny.gguf"), metadata=spm_metadata(prefix_space=prefix_space))
    return Tokenizer(
        gguf_tokenizer_definition(file),
        path=file.path,
        named_tokens=gguf_named_tokens(file),
        add_bos=True,
    )


def spm_encode(text: str) -> list[int]:
    """SentencePiece's rule read out loud: again and again join the pair whose result scores best
    (the leftmost of equals); what is left over is spelled in bytes."""
    ids = {word: index for index, (word, _, _) in enumerate(VOCABULARY)}
    scores = {word: score for word, score, kind in VOCABULARY if kind == NORMAL}
    pieces = list(text.replace(" ", SPACE))
    while True:
        pairs = [
            (-scores[left + right], at)
            for at, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    result = []
    for piece in pieces:
        known = ids.get(piece)
        result += [known] if known is not None else [ids[f"<0x{b:02X}>"] for b in piece.encode()]
    return result
