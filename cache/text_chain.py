"""Prefixes of prompts whose tokens are not known, followed by blocks of their text.

64 bytes of text stand for about 16 tokens. The chain is like that of tokens (`cache.hashing`), from
a beginning of its own: under one root, no text's links are those of tokens.
"""

from __future__ import annotations

import xxhash

TEXT_BLOCK_BYTES = 64
_TAG = b"forebay/text-blocks/1"


def text_links(root: bytes, data: bytes) -> list[bytes]:
    """The links of every full block of `data`, in order; a partial tail has none.

    `root` says for whom (`cache.hashing.chain_root`). `data` is the prompt's bytes, written such
    that a prompt which goes on from another one begins with the other one's bytes.
    """
    digest = xxhash.xxh3_128_digest
    link = digest(_TAG + root)
    links: list[bytes] = []
    append = links.append
    for end in range(TEXT_BLOCK_BYTES, len(data) + 1, TEXT_BLOCK_BYTES):
        link = digest(link + data[end - TEXT_BLOCK_BYTES : end])
        append(link)
    return links
