"""Links made for routing are those under which the engine publishes blocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.hashing import chain
from cache.prompt_links import prompt_links, token_bytes_of
from engine.request import EngineRequest, SharedPrefix
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

ROOT, SHARED_ROOT = b"r" * 16, b"s" * 16


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400),
    st.sampled_from([16, 32, 64]),
    st.none() | st.integers(1, 20),
    st.integers(0, 2**31 - 1),
)
def test_links_are_the_engines_own(
    tokens: int, block_tokens: int, shared_blocks: int | None, seed: int
) -> None:
    ids = [(seed + 7919 * i) % 2**31 for i in range(tokens)]
    shared_tokens = min((shared_blocks or 0) * 16, tokens // 16 * 16)
    shared = SharedPrefix(SHARED_ROOT, shared_tokens) if shared_blocks else None
    request = EngineRequest("r", ids, SamplingParams(max_tokens=1), ROOT, shared=shared)
    expected = [key.link for key in Sequence(request, 0).block_keys(block_tokens, tokens)]
    links = prompt_links(
        ROOT,
        token_bytes_of(ids),
        block_tokens=block_tokens,
        shared_root=SHARED_ROOT if shared else None,
        shared_tokens=shared_tokens,
    )
    assert list(links) == expected


def test_token_bytes_are_little_endian_words() -> None:
    assert token_bytes_of([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert token_bytes_of([]) == b""


def test_without_a_shared_prefix_it_is_the_plain_chain() -> None:
    data = token_bytes_of(range(100))
    assert list(prompt_links(ROOT, data)) == list(chain(ROOT, data))
