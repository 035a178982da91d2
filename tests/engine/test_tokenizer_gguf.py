"""Tokenizers built from GGUF metadata: the right rule by name, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from engine.errors import ModelLoadError
from engine.tokenizer import Tokenizer
from engine.tokenizer_gguf import gguf_named_tokens, gguf_tokenizer_definition
from tests.engine.checkpoints import byte_tokenizer_definition
from tests.engine.spm_vocabulary import spm_encode, spm_metadata, spm_tokenizer


def bpe_file(pre: str, **changes: object) -> SimpleNamespace:
    definition = byte_tokenizer_definition()
    tokens = list(definition["model"]["vocab"])
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 3)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in definition["model"]["merges"]],
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return SimpleNamespace(path=Path("tiny.gguf"), metadata=metadata)


def pieces(pre: str, text: str) -> list[str]:
    """How the rule of this name cuts a text, before any merging."""
    definition = gguf_tokenizer_definition(bpe_file(pre))
    cutters = []
    for part in definition["pre_tokenizer"]["pretokenizers"]:
        if part["type"] == "Digits":
            cutters.append(pre_tokenizers.Digits(individual_digits=True))
        elif part["type"] == "Split":
            cutters.append(pre_tokenizers.Split(Regex(part["pattern"]["Regex"]), "isolated"))
        else:
            cutters.append(
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=part["use_regex"])
            )
    cut = pre_tokenizers.Sequence(cutters).pre_tokenize_str(text)
    return [text[start:stop] for _, (start, stop) in cut]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("default", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("smollm", "it's 1234  x", ["it", "'s", " ", "1", "2", "3", "4", " ", " x"]),
        ("llama-bpe", "IT'S 1234\n\n x", ["IT", "'S", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "IT'S 1234\n\n x", ["IT", "'S", " ", "1", "2", "3", "4", "\n\n", " x"]),
        (
            "tekken",
            "helloWorld HTTPServer/\n12",
            ["hello", "World", " HTTPServer", "/\n", "1", "2"],
        ),
    ],
)
def test_text_is_cut_by_the_named_rule(pre, text, expected):
    assert pieces(pre, text) == expected


def test_an_unknown_rule_is_refused_by_name():
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: pre-tokenizer bloom is not supported"):
        gguf_tokenizer_definition(bpe_file("bloom"))


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(ModelLoadError, match="tokenizer model bert is not supported"):
        gguf_tokenizer_definition(bpe_file("gpt-2", model="bert"))


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ModelLoadError, match=r"1 tokenizer\.ggml\.token_type for 269 tokens"):
        gguf_tokenizer_definition(bpe_file("gpt-2", token_type=[1]))


def test_same_ids_as_the_definition_it_came_from():
    own = Tokenizer(byte_tokenizer_definition(), path=Path("x"), named_tokens={})
    built = Tokenizer(gguf_tokenizer_definition(bpe_file("gpt-2")), path=Path("x"), named_tokens={})
    for text in ("the thing there", "<|im_start|>er<|im_end|>", "\u4e16\u754c \u00e9"):
        for control in (True, False):
            assert built.encode(text, control_tokens=control) == own.encode(
                text, control_tokens=control
            )


def test_composed_form_where_the_rule_says_so():
    decomposed = "e\u0301"
    ids = {
        pre: Tokenizer(
            gguf_tokenizer_definition(bpe_file(pre)), path=Path("x"), named_tokens={}
        ).encode(decomposed, control_tokens=False)
        for pre in ("qwen2", "llama-bpe")
    }
    assert len(ids["qwen2"]) == 1
    assert len(ids["llama-bpe"]) == 3


def test_roles_are_read_by_id():
    file = SimpleNamespace(path=Path("x"), metadata=spm_metadata(prefix_space=True))
    assert gguf_named_tokens(file) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="abcdefhinrst<>/ \u4e16\U0001f600", max_size=16))
def test_sentencepiece_ids_follow_the_scores(text):
    tokenizer = spm_tokenizer(prefix_space=False)
    assert tokenizer.encode(text, control_tokens=False) == spm_encode(text)
    assert tokenizer.decode(tokenizer.encode(text, control_tokens=False)) == text


def test_sentencepiece_space_goes_before_the_text_only():
    tokenizer = spm_tokenizer(prefix_space=True)
    assert tokenizer.encode("the", control_tokens=False) == spm_encode(" the")
    after_control = tokenizer.encode("<s>the", control_tokens=True)
    assert after_control == [1, *spm_encode("the")]
    assert tokenizer.encode_marked("<s>the", "\U000f0000") == after_control
    assert tokenizer.encode_prompt("the") == [1, *spm_encode(" the")]


def test_sentencepiece_control_strings_cannot_be_merged_up_to():
    tokenizer = spm_tokenizer(prefix_space=False)
    ids = tokenizer.encode("<s>a</s>", control_tokens=False)
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == "<s>a</s>"


def test_user_defined_tokens_are_ordinary_vocabulary():
    tokenizer = spm_tokenizer(prefix_space=False)
    marker = tokenizer.token_id("[MARK]")
    assert tokenizer.encode("a[MARK]b", control_tokens=False)[1] == marker
    assert not tokenizer.is_control(marker)
    assert tokenizer.token_bytes(marker) == b"[MARK]"
