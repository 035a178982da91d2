"""The prefix chain: who it separates, what it shares, and that it never changes silently."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import chain, chain_root
from cache.identity import CacheIdentity

ROOT = chain_root(b"secret", "acme", "tenant", "tok")


def ids(*tokens: int) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def test_only_full_blocks_are_hashed():
    assert len(list(chain(ROOT, ids(*range(15))))) == 0
    assert len(list(chain(ROOT, ids(*range(16))))) == 1
    assert len(list(chain(ROOT, ids(*range(47))))) == 2


def test_a_change_spoils_its_block_and_every_later_one():
    tokens = list(range(64))
    before = list(chain(ROOT, ids(*tokens)))
    tokens[20] += 1
    after = list(chain(ROOT, ids(*tokens)))
    assert before[0] == after[0]
    assert all(a != b for a, b in zip(before[1:], after[1:], strict=True))


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_roots_differ_whenever_any_field_does(tenant, scope, other_tenant, other_scope):
    same = (tenant, scope) == (other_tenant, other_scope)
    first = chain_root(b"s", tenant, scope, "tok")
    second = chain_root(b"s", other_tenant, other_scope, "tok")
    assert (first == second) is same


def test_fields_cannot_run_into_each_other():
    assert chain_root(b"s", "a", "bc", "t") != chain_root(b"s", "ab", "c", "t")
    assert chain_root(b"s", "a", "b", "t") != chain_root(b"other", "a", "b", "t")


def test_the_chain_is_pinned():
    # Stored blocks outlive a release: these values may only change with a new tag.
    assert ROOT.hex() == "5272349e77504b0df0c99b0066c18b66"
    assert next(chain(ROOT, ids(*range(16)))).hex() == "c341c1c0e56a7ed689630752f8d32b5e"


def test_identity_separates_every_field():
    base = {
        "weights": "w", "adapter": "", "kv_dtype": "bfloat16",
        "layout": "l", "block_tokens": 16, "topology": "tp1",
    }  # fmt: skip
    digests = {CacheIdentity(**base).digest()}
    for field, value in base.items():
        changed = base | {field: 32 if isinstance(value, int) else value + "x"}
        digests.add(CacheIdentity(**changed).digest())
    assert len(digests) == 1 + len(base)
