"""The prefix chain: which text, for whom.

h_0 = HMAC-SHA256(server secret, tagged and length-prefixed tenant, scope, tokenizer identity), cut
to 16 bytes; h_i = xxh3_128(h_{i-1} || tokens_i) over blocks of 16 tokens as little-endian uint32.
One chain serves every replica and tier, whatever its dtype or block size (a multiple of 16): a
replica with larger blocks takes every (block / 16)-th link (`engine.sequence`).

xxh3 is fast, not collision-proof. Whoever finds a block by its hash compares its tokens too.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

import xxhash

from cache.block import NOBODY, TAG_BYTES, Owner

CHAIN_BLOCK_TOKENS = 16
HASH_BYTES = 16
_TOKEN_BYTES = 4
_ROOT_TAG = b"forebay/chain-root/1"
_OWNER_TAG = b"forebay/cache-owner/1"
_SHARED_TAG = b"forebay/shared-prefix/1"
_RESALT_TAG = b"forebay/after-shared-prefix/1"


def chain_root(secret: bytes, tenant: str, scope: str, tokenizer_identity: str) -> bytes:
    """The 16-byte start of every chain of one tenant and scope under one tokenizer.

    Every field is length-prefixed, so that no two different triples give the same bytes (tenant
    "a" with scope "bc" is not tenant "ab" with scope "c"), and keyed with the server's secret, so
    that no client can compute another tenant's root.
    """
    return _keyed(secret, _ROOT_TAG, tenant, scope, tokenizer_identity)[:HASH_BYTES]


def shared_root(secret: bytes, tokenizer_identity: str) -> bytes:
    """The start of the chain of prefixes that the operator shares with every tenant."""
    return _keyed(secret, _SHARED_TAG, tokenizer_identity)[:HASH_BYTES]


def owner_tags(secret: bytes, tenant: str, user: str | None) -> Owner:
    """Whose blocks are, as tags that tell nothing to who does not know the secret. `user` None:
    the tenant's users share."""
    tenant_tag = _keyed(secret, _OWNER_TAG, tenant)[:TAG_BYTES]
    if user is None:
        return Owner(tenant_tag, NOBODY.scope)
    return Owner(tenant_tag, _keyed(secret, _OWNER_TAG, tenant, user)[:TAG_BYTES])


def leave_shared(link: bytes, root: bytes) -> bytes:
    """The parent of a tenant's first own block after a shared prefix: from here on the chain is
    the tenant's alone."""
    state = xxhash.xxh3_128(_RESALT_TAG)
    state.update(link)
    state.update(root)
    return state.digest()


def extend_chain(parent: bytes, token_bytes: bytes | memoryview) -> bytes:
    """The hash of one 16-token block: 64 bytes of little-endian uint32 ids after `parent`."""
    state = xxhash.xxh3_128(parent)
    state.update(token_bytes)
    return state.digest()


def chain(root: bytes, token_bytes: bytes | memoryview) -> Iterator[bytes]:
    """The hashes of every full 16-token block of a prompt, in order; a partial tail has none.

    `token_bytes` holds the prompt as little-endian uint32 ids, four bytes each.
    """
    step = CHAIN_BLOCK_TOKENS * _TOKEN_BYTES
    view = memoryview(token_bytes)
    parent = root
    for start in range(0, len(view) - step + 1, step):
        parent = extend_chain(parent, view[start : start + step])
        yield parent


def _keyed(secret: bytes, tag: bytes, *parts: str) -> bytes:
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (tag, *(text.encode("utf-8", "surrogatepass") for text in parts)):
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()
