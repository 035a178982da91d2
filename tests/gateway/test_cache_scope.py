"""On what terms requests meet the cache: whose chain, and whose blocks."""

from __future__ import annotations

from cache.block import NOBODY
from cache.hashing import owner_tags
from engine.request import EngineRequest
from tests.gateway.stage import COMPLETIONS, K1, K2, SECRET, Stage, prompt, tenant


async def asked(stage: Stage, key: str = K1, **fields: object) -> EngineRequest:
    response = await stage.post(COMPLETIONS, prompt(max_tokens=1, **fields), key)
    assert response.status_code == 200
    return stage.replica.requests[-1]


async def test_blocks_belong_to_the_tenant_whatever_its_requests_say():
    stage = Stage()
    acme, beta = (owner_tags(SECRET, name, None) for name in ("acme", "beta"))
    assert (await asked(stage)).owner == acme
    assert (await asked(stage, user="ann", cache_salt="s", prompt_cache_key="k")).owner == acme
    assert (await asked(stage, K2)).owner == beta
    assert len({acme, beta, NOBODY}) == 3


async def test_under_scope_user_they_belong_to_the_user_whatever_the_salt():
    stage = Stage(tenants={K1: tenant("acme", cache_scope="user")})
    ann, bob = (owner_tags(SECRET, "acme", name) for name in ("ann", "bob"))
    plain = await asked(stage, user="ann")
    salted = await asked(stage, user="ann", cache_salt="s")
    assert plain.owner == salted.owner == ann
    assert plain.chain_root != salted.chain_root
    assert (await asked(stage, user="bob")).owner == bob
    assert ann.tenant == bob.tenant
    assert ann.scope != bob.scope


async def test_what_shares_with_nobody_belongs_to_nobody():
    stage = Stage(
        tenants={K1: tenant("a", cache_scope="none"), K2: tenant("b", cache_scope="user")}
    )
    for key in (K1, K2):
        request = await asked(stage, key)
        assert (request.chain_root, request.owner) == (None, NOBODY)
