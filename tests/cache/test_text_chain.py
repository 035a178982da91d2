"""Prefixes followed by their text."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.hashing import HASH_BYTES, chain
from cache.text_chain import TEXT_BLOCK_BYTES, text_links

ROOT = b"r" * 16


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.binary(max_size=400), st.binary(max_size=400))
def test_links_agree_exactly_as_far_as_whole_blocks_do(
    shared: bytes, one: bytes, other: bytes
) -> None:
    first, second = shared + one, shared + other
    links, others = text_links(ROOT, first), text_links(ROOT, second)
    assert len(links) == len(first) // TEXT_BLOCK_BYTES
    for index, (left, right) in enumerate(zip(links, others, strict=False)):
        end = (index + 1) * TEXT_BLOCK_BYTES
        assert (left == right) == (first[:end] == second[:end])


def test_more_text_keeps_the_earlier_links() -> None:
    data = bytes(range(256)) * 3
    links = text_links(ROOT, data)
    for end in (0, 63, 64, 65, 640, 700):
        assert text_links(ROOT, data[:end]) == links[: end // TEXT_BLOCK_BYTES]
    assert len(set(links)) == len(links)
    assert {len(link) for link in links} == {HASH_BYTES}


def test_no_link_is_another_root_s_or_that_of_tokens() -> None:
    data = bytes(640)
    links = set(text_links(ROOT, data))
    assert links.isdisjoint(text_links(b"s" * 16, data))
    assert links.isdisjoint(chain(ROOT, data))


def test_long_texts_are_quick() -> None:
    data = bytes(128 << 10)
    started_s = time.perf_counter()
    for _ in range(10):
        text_links(ROOT, data)
    # 0.3 ms each on an idle core; a guard against something quadratic
    assert time.perf_counter() - started_s < 0.5
