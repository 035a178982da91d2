"""The operator's API for the cache: who may use it, what it shows, what it removes."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx
import pytest

from cache.block import NOBODY, Tier
from cache.directory import Directory
from cache.hashing import owner_tags
from cache.report import CacheStats, Erased, TenantShare, TierStats
from gateway.dispatch.router import Router
from gateway.lifecycle import Phase
from gateway.named_cache_store import MemoryStore
from gateway.remote.model import make_remote_model
from gateway.remote.replica import RemoteReplica
from gateway.replica import ReplicaUnavailable
from gateway.settings import Settings
from policies.routing_ttft import PredictedTtft
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import (
    ADMIN,
    CHAT,
    COMPLETIONS,
    K1,
    K2,
    SECRET,
    Observer,
    Stage,
    error_of,
    prompt,
)
from tests.gateway.stage import chat as chat_body
from tests.gateway.stage import tenant as tenant_of

LONG = "a prompt that is longer than two blocks of sixteen tokens"
ROUTES = [
    ("GET", "/admin/cache"),
    ("POST", "/admin/cache/flush"),
    ("DELETE", "/admin/tenants/acme/cache"),
    ("DELETE", "/admin/tenants/acme/users/ann/cache"),
    ("GET", "/admin/requests/req-1/cache"),
]


@dataclass
class KeptReplica(ScriptedReplica):
    """Answers what a test puts into it, and keeps the tags that it was asked to erase."""

    shares: tuple[TenantShare, ...] = ()
    tiers: tuple[TierStats, ...] = (TierStats(Tier.DEVICE, total=10, free=10),)
    removed: Erased | Exception = field(default_factory=lambda: Erased(0, 0, None))
    erased: list[tuple[bytes, bytes | None]] = field(default_factory=list)

    def cache_stats(self) -> CacheStats:
        return CacheStats(self.tiers, self.shares)

    async def erase_cache(self, tenant: bytes, scope: bytes | None) -> Erased:
        self.erased.append((tenant, scope))
        return await self.flush_cache()

    async def flush_cache(self) -> Erased:
        if isinstance(self.removed, Exception):
            raise self.removed
        return self.removed


def staged(replica: ScriptedReplica | None = None, *, scope: str = "tenant") -> Stage:
    """Tenants acme and beta, both configured, of this scope."""
    tenants = {K1: tenant_of("acme", scope), K2: tenant_of("beta", scope)}
    stage = Stage(replica=replica or ScriptedReplica(), tenants=tenants)
    assert stage.app
    entries = [
        {"id": name, "keys": [{"env": "X"}], "cache": {"scope": scope}} for name in ("acme", "beta")
    ]
    settings = Settings(models=({"name": "m", "path": "bundled"},), tenants=tuple(entries))
    stage.runtime.replace(replace(stage.runtime.current, settings=settings))
    return stage


async def ask(
    stage: Stage, method: str, path: str, key: str | None = ADMIN, **params: str
) -> httpx.Response:
    async with stage.client(key) as client:
        return await client.request(method, path, params=params or None)


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("key", [None, "", "wrong", K1, ADMIN + " x", ADMIN[:-1]])
async def test_only_the_operators_key_is_taken(method: str, path: str, key: str | None) -> None:
    stage = staged()
    await stage.post(COMPLETIONS, prompt(LONG))
    held = dict(stage.replica.owners)
    response = await ask(stage, method, path, key)
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"
    assert held == stage.replica.owners != {}


async def test_the_operators_key_may_be_any_text() -> None:
    stage, key = staged(), "schlüssel à"
    digest = hashlib.sha256(key.encode()).digest()
    stage.runtime.replace(replace(stage.runtime.current, admin_key_digest=digest))
    async with stage.client(None) as client:
        headers = {b"authorization": b"bearer  " + key.encode()}
        assert (await client.get("/admin/cache", headers=headers)).status_code == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("key", [None, ADMIN])
async def test_without_an_operators_key_it_is_said_how_to_set_one(
    method: str, path: str, key: str | None
) -> None:
    stage = staged()
    stage.runtime.replace(replace(stage.runtime.current, admin_key_digest=None))
    response = await ask(stage, method, path, key)
    assert response.status_code == 403
    assert "FOREBAY_ADMIN_KEY" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/admin/", 404),
        ("GET", "/admin/tenants/acme/nothing", 404),
        ("GET", "/admin/tenants//cache", 404),
        ("POST", "/admin/cache", 405),
        ("GET", "/admin/tenants/acme/cache", 405),
        ("GET", "/admin/cache/flush", 405),
    ],
)
async def test_what_is_not_there(method: str, path: str, status: int) -> None:
    assert (await ask(staged(), method, path)).status_code == status


async def test_the_tiers_and_who_has_what() -> None:
    acme, beta, gone = (owner_tags(SECRET, name, None).tenant for name in ("acme", "beta", "gone"))
    replica = KeptReplica(
        tiers=(
            TierStats(Tier.DEVICE, 5, 3, 2, 10, 500, 1000, hits=7, misses={"never_seen": 4}),
            TierStats(
                Tier.REDIS, used_bytes=64, loads=2, load_s=0.5, dropped={"busy": 1}, up=False
            ),
        ),
        shares=(
            TenantShare(beta, 1, 0, 0),
            TenantShare(acme, 2, 3, 4),
            TenantShare(NOBODY.tenant, 1, 1, 1),
            TenantShare(gone, 0, 2, 0),
            TenantShare(b"12345678", 0, 0, 3),
        ),
    )
    answer = (await ask(staged(replica), "GET", "/admin/cache")).json()
    assert set(answer["models"]) == {"m", "org/other"}
    [model] = answer["models"]["m"]["replicas"]
    assert model["replica"] == "fake/0"
    device, redis = model["tiers"]
    assert device["blocks"] == {"free": 5, "cached": 3, "held": 2, "total": 10}
    assert (device["tier"], device["up"], device["hits"]) == ("device", True, 7)
    assert device["misses"] == {"never_seen": 4}
    assert (redis["up"], redis["loads"], redis["load_s"]) == (False, 2, 0.5)
    assert redis["dropped"] == {"busy": 1}
    assert model["owners"] == [
        {"owner": "tenant", "tenant": "acme", "device": 2, "dram": 3, "redis": 4},
        {"owner": "other", "tenant": None, "device": 0, "dram": 2, "redis": 3},
        {"owner": "shared", "tenant": None, "device": 1, "dram": 1, "redis": 1},
        {"owner": "tenant", "tenant": "beta", "device": 1, "dram": 0, "redis": 0},
    ]


async def test_an_erased_tenant_hits_nothing_and_others_keep_theirs() -> None:
    stage = staged()
    for key in (K1, K2):
        await stage.post(COMPLETIONS, prompt(LONG), key)
        assert await cached(stage, key) > 0
    response = await ask(stage, "DELETE", "/admin/tenants/acme/cache")
    assert response.status_code == 200
    answer = response.json()
    assert answer["complete"] is True
    assert (answer["tenant"], answer["user"], answer["named_prefixes"]) == ("acme", None, 0)
    removed = answer["models"]["m"]["device"] + answer["models"]["org/other"]["device"]
    assert removed > 0
    assert await cached(stage, K2) > 0
    assert await cached(stage, K1) == 0
    again = await ask(stage, "DELETE", "/admin/tenants/acme/cache")
    assert again.status_code == 200


@pytest.mark.parametrize("by_path", [True, False])
async def test_one_user_is_erased_where_users_are_separate(by_path: bool) -> None:
    stage = staged(scope="user")
    users = ("ann/cache", "bob")
    for user in users:
        await stage.post(COMPLETIONS, prompt(LONG, user=user))
    if by_path:
        response = await ask(stage, "DELETE", "/admin/tenants/acme/users/ann%2Fcache/cache")
    else:
        response = await ask(stage, "DELETE", "/admin/tenants/acme/cache", user="ann/cache")
    assert response.status_code == 200
    assert response.json()["user"] == "ann/cache"
    assert await cached(stage, K1, user="bob") > 0
    assert await cached(stage, K1, user="ann/cache") == 0


async def test_a_user_of_a_tenant_whose_users_share_is_refused() -> None:
    stage = staged()
    response = await ask(stage, "DELETE", "/admin/tenants/acme/cache", user="ann")
    assert response.status_code == 409
    assert error_of(response)["code"] == "users_not_separate"
    response = await ask(stage, "DELETE", "/admin/tenants/acme/cache", user="")
    assert (response.status_code, error_of(response)["param"]) == (400, "user")


async def test_a_tenant_that_is_not_configured_is_erased_only_when_that_is_meant() -> None:
    replica = KeptReplica()
    stage = staged(replica)
    refused = await ask(stage, "DELETE", "/admin/tenants/gone/cache")
    assert refused.status_code == 404
    assert "unknown=allow" in error_of(refused)["message"]
    assert "--unknown" in error_of(refused)["message"]
    assert replica.erased == []
    for path in ("/admin/tenants/a b/cache", "/admin/tenants/%C3%BC/cache"):
        assert (await ask(stage, "DELETE", path, unknown="allow")).status_code == 400
    odd = await ask(stage, "DELETE", "/admin/tenants/gone/cache", unknown="yes")
    assert (odd.status_code, error_of(odd)["param"]) == (400, "unknown")
    erased = await ask(stage, "DELETE", "/admin/tenants/gone/cache", unknown="allow")
    assert erased.status_code == 200
    one = await ask(stage, "DELETE", "/admin/tenants/gone/cache", unknown="allow", user="ann")
    assert one.status_code == 200
    tags = owner_tags(SECRET, "gone", "ann")
    assert set(replica.erased) == {(tags.tenant, None), (tags.tenant, tags.scope)}


async def test_redis_out_of_reach_is_503_and_says_what_was_done() -> None:
    redis = TierStats(Tier.REDIS, up=False)
    device = TierStats(Tier.DEVICE, total=10, free=10)
    stage = staged(KeptReplica(removed=Erased(3, 2, None), tiers=(device, redis)))
    for method, path in (("DELETE", "/admin/tenants/acme/cache"), ("POST", "/admin/cache/flush")):
        response = await ask(stage, method, path)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        answer = response.json()
        assert answer["complete"] is False
        assert answer["models"]["m"] == {"device": 3, "dram": 2, "redis": None}
        assert answer["error"]["code"] == "cache_partly_removed"
        assert "m: Redis could not be asked" in answer["error"]["message"]


async def test_tiers_that_are_off_are_nothing_to_complain_about() -> None:
    stage = staged(KeptReplica(removed=Erased(3, 0, None)))
    response = await ask(stage, "POST", "/admin/cache/flush")
    assert response.status_code == 200
    assert response.json() == {
        "complete": True,
        "not_covered": [],
        "models": {"m": {"device": 3}, "org/other": {"device": 3}},
    }


async def test_an_engine_that_fails_is_said_without_its_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage = staged(KeptReplica(removed=RuntimeError("inner words")))
    response = await ask(stage, "POST", "/admin/cache/flush", model="m")
    assert response.status_code == 503
    assert "inner words" not in response.text
    assert response.json()["models"] == {"m": {"error": "failed; the server's log says why"}}
    capsys.readouterr()


async def test_a_removal_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(KeptReplica):
        async def flush_cache(self) -> Erased:
            await asyncio.sleep(60)
            raise AssertionError

    monkeypatch.setattr("gateway.admin.cache._REMOVAL_S", 0.01)
    response = await ask(staged(Stuck()), "POST", "/admin/cache/flush", model="m")
    assert response.status_code == 503
    assert "m: was not done within" in response.json()["error"]["message"]


async def test_a_flush_empties_one_model_or_all() -> None:
    stage = staged()
    await stage.post(COMPLETIONS, prompt(LONG))
    unknown = await ask(stage, "POST", "/admin/cache/flush", model="nope")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
    misspelt = await ask(stage, "POST", "/admin/cache/flush", modle="m")
    assert (misspelt.status_code, error_of(misspelt)["param"]) == (400, "modle")
    assert await cached(stage, K1) > 0
    answer = (await ask(stage, "POST", "/admin/cache/flush", model="m")).json()
    assert list(answer["models"]) == ["m"]
    assert answer["models"]["m"]["device"] > 0
    assert await cached(stage, K1) == 0


async def test_erasing_takes_the_named_prefixes_along() -> None:
    stage = staged()
    made = await stage.post(
        "/v1/caches",
        {"name": "book", "model": "m", "messages": chat_body(LONG)["messages"], "ttl": "1h"},
    )
    assert made.status_code == 201, made.text
    answer = (await ask(stage, "DELETE", "/admin/tenants/acme/cache")).json()
    assert answer["named_prefixes"] == 1
    reply = await stage.post(CHAT, chat_body("hi", cached_content="book"))
    assert reply.status_code == 404


async def test_named_prefixes_that_redis_still_holds_make_an_erasure_incomplete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def out_of_reach(*_: object) -> bool:
        return False

    monkeypatch.setattr(MemoryStore, "refresh", out_of_reach)
    response = await ask(staged(), "DELETE", "/admin/tenants/acme/cache")
    assert response.status_code == 503
    answer = response.json()
    assert answer["complete"] is False
    assert answer["error"]["code"] == "cache_partly_removed"
    assert "named prefixes" in answer["error"]["message"]


async def test_nothing_is_shown_while_loading() -> None:
    stage = staged()
    stage.lifecycle.phase = Phase.LOADING
    assert (await ask(stage, "GET", "/admin/cache")).status_code == 503


async def cached(stage: Stage, key: str, **fields: Any) -> int:
    response = await stage.post(COMPLETIONS, prompt(LONG, **fields), key)
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def test_what_nobody_could_be_asked_to_erase_is_not_called_erased() -> None:
    """A worker that is down has lost its own tiers, but Redis holds what it wrote there."""
    down = KeptReplica(alive=False, tiers=(), removed=ReplicaUnavailable("The worker is down."))
    stage = staged(down)
    response = await ask(stage, "DELETE", "/admin/tenants/acme/cache")
    assert (response.status_code, response.json()["complete"]) == (503, False)
    assert "no replica could be asked" in response.json()["error"]["message"]


async def test_a_worker_that_can_be_asked_erases_redis_for_one_that_is_down() -> None:
    tiers = (TierStats(Tier.DEVICE, total=10, free=10), TierStats(Tier.REDIS))
    well = KeptReplica(name="m/1", tiers=tiers, removed=Erased(2, 0, 3))
    stage = Stage(
        replica=KeptReplica(alive=False, tiers=(), removed=ReplicaUnavailable("down")),
        other_replicas=[well],
    )
    response = await ask(stage, "POST", "/admin/cache/flush")
    assert (response.status_code, response.json()["complete"]) == (200, True)
    assert response.json()["models"]["m"] == {"device": 2, "redis": 3}


async def test_models_that_run_elsewhere_are_said_not_to_be_covered() -> None:
    stage = staged(KeptReplica(removed=Erased(3, 0, None)))
    router: Router[RemoteReplica] = Router(
        "far", Directory(), PredictedTtft(), "predicted-ttft", Random(0), Observer(stage.metrics)
    )
    stage.models.add(make_remote_model("far", router, SECRET, 1))
    for method, path in (("DELETE", "/admin/tenants/acme/cache"), ("POST", "/admin/cache/flush")):
        answer = (await ask(stage, method, path)).json()
        assert (answer["complete"], answer["not_covered"]) == (True, ["far"])
        assert "far" not in answer["models"]
    one = (await ask(stage, "POST", "/admin/cache/flush", model="m")).json()
    assert one["not_covered"] == []
