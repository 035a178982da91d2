"""A tokenizer definition built from a GGUF file's vocabulary.

GGUF stores the vocabulary, the merges or scores, and the name of the rule that cuts text before
merging (`tokenizer.ggml.pre`); the rules themselves are fixed by name and written here in the
`tokenizer.json` format. A name that is not known is refused: a nearly right rule gives nearly
right ids.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ModelLoadError
from engine.tokenizer_definition import SPACE_MARK
from engine.weights.fields import Fields
from engine.weights.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _cut_by(pattern: str) -> list[dict[str, Any]]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _byte_level(use_regex=False)]


_GPT2 = [_byte_level(use_regex=True)]
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": [{"type": "Digits", "individual_digits": True}, *_GPT2],
    "llama-bpe": _cut_by(_LLAMA3_PATTERN),
    "qwen2": _cut_by(_QWEN2_PATTERN),
    "deepseek-r1-qwen": _cut_by(_QWEN2_PATTERN),
    "tekken": _cut_by(_TEKKEN_PATTERN),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")  # a word in the vocabulary is not merged up to
_BOS_BY_CUSTOM = ("llama-bpe", "tekken")
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is brought to Unicode's composed form first


def gguf_tokenizer_definition(file: GgufFile) -> dict[str, Any]:
    """The file's tokenizer in the `tokenizer.json` format.

    Raises ModelLoadError, naming it, for a tokenizer model or pre-tokenizer that is not known.
    """
    fields = Fields(file.path, file.metadata, "tokenizer.ggml.")
    kind = fields.text("model")
    tokens: list[str] = fields.strings("tokens")
    types = fields.raw("token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(
            f"{file.path}: {len(types)} tokenizer.ggml.token_type for {len(tokens)} tokens"
        )
    added = [
        _added_token(index, text, special=kind_of_token in (_CONTROL, _UNKNOWN))
        for index, (text, kind_of_token) in enumerate(zip(tokens, types, strict=True))
        if kind_of_token in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    vocab = {text: index for index, text in enumerate(tokens)}
    if kind == "gpt2":
        return {"added_tokens": added} | _byte_level_parts(fields, vocab)
    if kind == "llama":
        return {"added_tokens": added} | _sentencepiece_parts(fields, tokens, types, vocab)
    raise ModelLoadError(
        f"{file.path}: tokenizer model {kind} is not supported (gpt2 and llama are)"
    )


def gguf_expects_bos(file: GgufFile) -> bool:
    """Whether prompts begin with BOS where the file does not say: by custom of its tokenizer."""
    fields = Fields(file.path, file.metadata, "tokenizer.ggml.")
    return fields.text("model") == "llama" or fields.text("pre", "default") in _BOS_BY_CUSTOM


def gguf_named_tokens(file: GgufFile) -> dict[str, str]:
    """The tokens that chat templates know by role, by their strings."""
    fields = Fields(file.path, file.metadata, "tokenizer.ggml.")
    tokens = fields.strings("tokens")
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {}
    for role, stored_role in roles.items():
        key = f"{stored_role}_token_id"
        if key in fields and 0 <= fields.integer(key) < len(tokens):
            named[f"{role}_token"] = tokens[fields.integer(key)]
    return named


def _byte_level_parts(fields: Fields, vocab: dict[str, int]) -> dict[str, Any]:
    pre = fields.text("pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{fields.path}: pre-tokenizer {pre} is not supported ({', '.join(_PRE_TOKENIZERS)})"
        )
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
            "vocab": vocab,
            "merges": fields.strings("merges"),
        },
    }


def _sentencepiece_parts(
    fields: Fields, tokens: list[str], types: list[int], vocab: dict[str, int]
) -> dict[str, Any]:
    """Byte pairs by descending score, bytes as fallback, spaces written as U+2581."""
    scores = fields.raw("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{fields.path}: tokenizer.ggml.scores must have one entry per token")
    if _BYTE not in types:
        raise ModelLoadError(f"{fields.path}: a llama tokenizer without byte tokens")
    prefix_space = fields.flag("add_space_prefix", True)
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix_space else []
    unknown = fields.integer("unknown_token_id", 0)
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE_MARK,
            "prepend_scheme": "first" if prefix_space else "never",
            "split": False,
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown] if 0 <= unknown < len(tokens) else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": _merges_by_score(tokens, types, scores, vocab),
        },
    }


def _merges_by_score(
    tokens: list[str], types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to split an ordinary token into two others, best-scored result first.

    Ties keep vocabulary order, then the order of the parts' ids.
    """
    merges: list[tuple[float, int, int, int]] = []
    skipped = (_CONTROL, _UNKNOWN, _BYTE)
    for index, text in enumerate(tokens):
        if types[index] in skipped:
            continue
        for cut in range(1, len(text)):
            left, right = vocab.get(text[:cut]), vocab.get(text[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], index, left, right))
    merges.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in merges]


def _added_token(index: int, text: str, *, special: bool) -> dict[str, Any]:
    return {"id": index, "content": text, "normalized": False, "special": special}
