"""The wire format of a stored block: a header that says everything a hit must agree with, and the
payload behind it. Pure; nothing here does I/O.

    offset  bytes
         0      8  magic "forebay" and the format's version
         8     32  cache identity: which weights, dtype, layout, topology (`cache.identity`)
        40      8  tenant tag
        48      8  scope tag
        56     16  link: the block's chain hash
        72     16  parent: the chain hash before it
        88      8  start: position of its first token
        96      4  tokens in the block
       100      4  1 if sealed, else 0
       104     16  dtype's name, padded with zeros
       120      8  payload bytes
       128     16  xxh3_128 of the whole value with these 16 bytes zero; zero if sealed
       144     12  nonce; zero if not sealed
       ...         zeros, so that the header's length is a multiple of 64
       -4n     4n  token ids as uint32, the header's last bytes

Integers are little-endian. The payload's shape is part of the identity's layout. In a sealed value
the token ids and the payload are one AES-GCM text, 16 bytes longer than plain, with the bytes
before it and the key's name bound to it.
"""

from __future__ import annotations

import struct

import xxhash

from cache.block import BlockKey
from cache.sealing import NONCE_BYTES, SEAL_BYTES, Sealer

KEY_PREFIX = b"forebay:kv:"
VERSION = 1

_MAGIC = b"forebay"
_FIXED = struct.Struct("<7sB32s8s8s16s16sQII16sQ16s12s")
_CHECKSUM = slice(128, 144)
_TOKEN_BYTES = 4
_ALIGN = 64
_DTYPE_BYTES = 16
_IDENTITY_BYTES = 32
_NO_CHECKSUM = bytes(16)
_NO_NONCE = bytes(NONCE_BYTES)


class BadValue(Exception):
    """What Redis held under a block's key is not that block."""


class Corrupt(BadValue):
    """The value is damaged: cut short, changed, or never whole."""


class Foreign(BadValue):
    """The value is sound, and of another identity, owner, text or format."""


def header_bytes(block_tokens: int) -> int:
    """Room in front of a payload of blocks of `block_tokens`; a multiple of 64."""
    return -(-(_FIXED.size + block_tokens * _TOKEN_BYTES) // _ALIGN) * _ALIGN


class Envelope:
    """Wraps and opens the blocks of one cache identity.

    `identity_digest` is `CacheIdentity.digest()`, `payload_bytes` the size of one block's KV,
    `dtype` its element type's name (at most 16 ASCII characters). With a `sealer`, values are
    sealed, and plain ones are not accepted. Thread-safe.
    """

    def __init__(
        self,
        identity_digest: bytes,
        block_tokens: int,
        payload_bytes: int,
        dtype: str,
        sealer: Sealer | None = None,
    ) -> None:
        if len(identity_digest) != _IDENTITY_BYTES:
            raise ValueError(f"identity_digest: {len(identity_digest)} bytes, must be 32")
        self._dtype = dtype.encode("ascii")
        if len(self._dtype) > _DTYPE_BYTES:
            raise ValueError(f"dtype: {dtype!r} is longer than {_DTYPE_BYTES} characters")
        if block_tokens <= 0 or payload_bytes <= 0:
            raise ValueError("block_tokens and payload_bytes: must be positive")
        self.identity_digest = identity_digest
        self.block_tokens = block_tokens
        self.payload_bytes = payload_bytes
        self.header_bytes = header_bytes(block_tokens)
        self.slot_bytes = self.header_bytes + payload_bytes
        sealed_bytes = self.slot_bytes + SEAL_BYTES
        self.value_bytes = self.slot_bytes if sealer is None else sealed_bytes
        self.other_value_bytes = sealed_bytes if sealer is None else self.slot_bytes
        """Of a value that was sealed where this envelope's are not, or the other way round."""
        self.identity_name = identity_digest.hex().encode()
        """How the identity stands in the blocks' keys."""
        self.key_prefix = KEY_PREFIX + self.identity_name + b":"
        self._tokens_at = self.header_bytes - block_tokens * _TOKEN_BYTES
        self._padding = bytes(self._tokens_at - _FIXED.size)
        self._sealer = sealer

    def key_of(self, key: BlockKey) -> bytes:
        """The block's key in Redis: prefix, identity, tenant, scope, link, in hex between colons,
        so that a SCAN can tell whose a key is."""
        return self.key_prefix + b":".join(
            part.hex().encode() for part in (key.owner.tenant, key.owner.scope, key.link)
        )

    def write_header(self, key: BlockKey, slot: memoryview) -> None:
        """Make `slot` (`slot_bytes` long, the payload in its place) a plain stored value.

        Raises ValueError if `slot` has another size or `key` is of another block size.
        """
        if len(slot) != self.slot_bytes:
            raise ValueError(f"slot: {len(slot)} bytes, must be {self.slot_bytes}")
        slot[: self._tokens_at] = self._clear(key, _NO_NONCE)
        slot[self._tokens_at : self.header_bytes] = key.token_bytes
        slot[_CHECKSUM] = xxhash.xxh3_128_digest(slot)

    def wrap(self, key: BlockKey, slot: memoryview) -> memoryview | bytes:
        """What to store for `slot`: the slot itself with its header written, or a sealed copy.

        The caller must leave the slot alone until the result has been sent.
        """
        if self._sealer is None:
            self.write_header(key, slot)
            return slot
        if len(slot) != self.slot_bytes:
            raise ValueError(f"slot: {len(slot)} bytes, must be {self.slot_bytes}")
        nonce = self._sealer.nonce()
        clear = self._clear(key, nonce)
        slot[self._tokens_at : self.header_bytes] = key.token_bytes
        bound = self.key_of(key) + clear
        return clear + self._sealer.seal(nonce, slot[self._tokens_at :], bound)

    def open(self, key: BlockKey, value: bytes, into: memoryview) -> None:
        """Verify that `value` is the block `key` of this identity and copy its payload to `into`
        (`payload_bytes` long). Nothing is written before every check has passed.

        Raises Corrupt or Foreign, and ValueError if `into` has another size.
        """
        if len(into) != self.payload_bytes:
            raise ValueError(f"into: {len(into)} bytes, must be {self.payload_bytes}")
        plain = self._verified(key, memoryview(value))
        tokens_bytes = self.block_tokens * _TOKEN_BYTES
        if plain[:tokens_bytes] != key.token_bytes:
            raise Foreign("other token ids")
        into[:] = plain[tokens_bytes:]

    def _clear(self, key: BlockKey, nonce: bytes) -> bytes:
        """The header up to the token ids, with no checksum yet."""
        if len(key.token_bytes) != self.block_tokens * _TOKEN_BYTES:
            tokens = len(key.token_bytes) // _TOKEN_BYTES
            raise ValueError(f"key: a block of {tokens} tokens, must be {self.block_tokens}")
        fixed = _FIXED.pack(
            _MAGIC,
            VERSION,
            self.identity_digest,
            key.owner.tenant,
            key.owner.scope,
            key.link,
            key.parent,
            key.start,
            self.block_tokens,
            int(self._sealer is not None),
            self._dtype,
            self.payload_bytes,
            _NO_CHECKSUM,
            nonce,
        )
        return fixed + self._padding

    def _verified(self, key: BlockKey, value: memoryview) -> memoryview:
        """Token ids and payload of a value that is whole and says it is `key`."""
        if len(value) < _FIXED.size:
            raise Corrupt("shorter than a header")
        (magic, version, *_, tokens, sealed, _, payload_bytes, checksum, nonce) = (
            _FIXED.unpack_from(value)
        )
        if magic != _MAGIC:
            raise Corrupt("not a block")
        if version != VERSION:
            raise Foreign("other format version")
        declared = header_bytes(tokens) + payload_bytes + (SEAL_BYTES if sealed else 0)
        if len(value) != declared:
            raise Corrupt("not as long as its header says")
        if not sealed and checksum != _checksum(value):
            raise Corrupt("checksum differs")
        clear = self._clear(key, nonce)
        if value[: _CHECKSUM.start] != clear[: _CHECKSUM.start]:
            raise Foreign("other identity, owner or text")
        if self._sealer is None:
            return value[self._tokens_at :]
        # The exact bytes before the sealed text are bound to it, so any change in them shows.
        bound = self.key_of(key) + bytes(value[: self._tokens_at])
        plain = self._sealer.open(nonce, value[self._tokens_at :], bound)
        if plain is None:
            raise Corrupt("sealed otherwise")
        return memoryview(plain)


def tenant_of(stored_key: bytes) -> bytes | None:
    """The tenant tag in a stored block's key, or None for a key of another kind."""
    parts = stored_key.removeprefix(KEY_PREFIX).split(b":")
    if not stored_key.startswith(KEY_PREFIX) or len(parts) != 4:
        return None
    try:
        return bytes.fromhex(parts[1].decode("ascii"))
    except ValueError:
        return None


def owner_pattern(tenant: bytes, scope: bytes | None) -> bytes:
    """A SCAN pattern for every stored block of a tenant, or of one of its scopes."""
    scopes = b"*" if scope is None else scope.hex().encode()
    return KEY_PREFIX + b"*:" + tenant.hex().encode() + b":" + scopes + b":*"


def _checksum(value: memoryview) -> bytes:
    state = xxhash.xxh3_128(value[: _CHECKSUM.start])
    state.update(_NO_CHECKSUM)
    state.update(value[_CHECKSUM.stop :])
    return bytes(state.digest())
