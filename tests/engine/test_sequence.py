"""A sequence's block keys are the prefix chain's links, at every block size."""

import numpy as np
import pytest

from cache.hashing import chain
from engine.sequence import Sequence
from tests.engine.harness import ROOT, request


def links(tokens: list[int]) -> list[bytes]:
    return list(chain(ROOT, np.asarray(tokens, dtype="<u4").tobytes()))


@pytest.mark.parametrize("block_tokens", [16, 32, 48])
def test_larger_blocks_take_every_nth_link_of_the_one_chain(block_tokens):
    tokens = list(range(200))
    keys = Sequence(request("a", tokens), 0).block_keys(block_tokens, len(tokens))
    stride = block_tokens // 16
    assert [key.link for key in keys] == links(tokens)[stride - 1 :: stride][: len(keys)]
    assert len(keys) == 200 // block_tokens
    assert [key.parent for key in keys] == [ROOT, *(key.link for key in keys[:-1])]


def test_generated_tokens_extend_the_chain():
    sequence = Sequence(request("a", list(range(20)), max_tokens=20), 0)
    before = sequence.block_keys(16, 20)
    for token in range(12):
        sequence.append(token)
    assert sequence.block_keys(16, 32)[: len(before)] == before
    assert [key.link for key in sequence.block_keys(16, 32)] == links([*range(20), *range(12)])


def test_opting_out_has_no_keys():
    assert Sequence(request("a", list(range(64)), root=None), 0).block_keys(16, 64) == []
