"""A whole prompt's chain links at once, as the gateway needs them to ask who has its beginning.

They are exactly those under which `engine.sequence.Sequence` publishes the prompt's blocks.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import xxhash

from cache.hashing import CHAIN_BLOCK_TOKENS, leave_shared

_BLOCK_BYTES = 4 * CHAIN_BLOCK_TOKENS
_WIDE = "I" if array("I").itemsize == 4 else "L"


def token_bytes_of(token_ids: Sequence[int]) -> bytes:
    """Ids as little-endian uint32, four bytes each."""
    packed = array(_WIDE, token_ids)
    if packed.itemsize != 4:
        raise RuntimeError("this machine has no 4-byte unsigned integers")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def prompt_links(
    root: bytes,
    token_bytes: bytes,
    *,
    block_tokens: int = CHAIN_BLOCK_TOKENS,
    shared_root: bytes | None = None,
    shared_tokens: int = 0,
) -> tuple[bytes, ...]:
    """The links of a prompt's full blocks of `block_tokens` (a multiple of 16), in order.

    `token_bytes` holds the prompt as `token_bytes_of` gives it. Its first `shared_tokens` are an
    operator's shared prefix, chained from `shared_root`: blocks that lie wholly in it are
    everybody's, and the first one behind them continues under `root`.
    """
    sub_blocks = block_tokens // CHAIN_BLOCK_TOKENS
    full = len(token_bytes) // (_BLOCK_BYTES * sub_blocks)
    shared = 0 if shared_root is None else min(full, shared_tokens // block_tokens)
    links: list[bytes] = []
    link = root if shared_root is None or not shared else shared_root
    link = _extend(links, link, token_bytes, 0, shared, sub_blocks)
    if shared and shared < full:
        link = leave_shared(link, root)
    _extend(links, link, token_bytes, shared, full, sub_blocks)
    return tuple(links)


def _extend(
    links: list[bytes], link: bytes, token_bytes: bytes, first: int, end: int, sub_blocks: int
) -> bytes:
    """Append the links of blocks first:end; returns the last, or `link` if there are none."""
    digest = xxhash.xxh3_128_digest
    step = _BLOCK_BYTES
    if sub_blocks == 1:
        for start in range(first * step, end * step, step):
            link = digest(link + token_bytes[start : start + step])
            links.append(link)
        return link
    for block in range(first, end):
        for at in range(block * sub_blocks, (block + 1) * sub_blocks):
            link = digest(link + token_bytes[at * step : (at + 1) * step])
        links.append(link)
    return link
