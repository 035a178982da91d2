"""Names, aliases and fallbacks of models."""

from __future__ import annotations

import pytest

from gateway.models import Models
from gateway.settings import ModelSettings
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import CHAT, K1, Stage, chat, error_of, tenant


def settings(name: str, **fields: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": name, "path": "bundled", **fields})


def staged(**fields: object) -> Stage:
    """A stage whose model m is also called alias, with org/other to fall back to."""
    stage = Stage(**fields)
    _ = stage.app
    stage.models.configure(
        [settings("m", aliases=["alias"], fallbacks=["org/other"]), settings("org/other")]
    )
    return stage


async def test_an_alias_is_another_way_to_ask_for_the_model() -> None:
    response = await staged().post(CHAT, chat(model="alias"))
    assert (response.status_code, response.json()["model"]) == (200, "m")


async def test_whoever_may_not_use_the_model_may_not_use_its_alias() -> None:
    stage = staged(tenants={K1: tenant(models=("alias",))})
    response = await stage.post(CHAT, chat(model="alias"))
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


async def test_a_fallback_runs_when_no_replica_serves_and_says_that_it_ran() -> None:
    stage = staged()
    [member] = stage.models["m"].router.members
    member.draining = True
    response = await stage.post(CHAT, chat())
    assert (response.status_code, response.json()["model"]) == (200, "org/other")
    member.draining = False
    assert (await stage.post(CHAT, chat())).json()["model"] == "m"


async def test_a_fallback_must_be_one_that_the_tenant_may_use() -> None:
    stage = staged(tenants={K1: tenant(models=("m",))})
    [member] = stage.models["m"].router.members
    member.draining = True
    response = await stage.post(CHAT, chat())
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")


async def test_without_a_fallback_there_is_none() -> None:
    stage = Stage()
    _ = stage.app
    [member] = stage.models["m"].router.members
    member.draining = True
    response = await stage.post(CHAT, chat())
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1


async def test_readiness_is_off_when_no_replica_of_any_model_serves() -> None:
    stage = Stage(replica=ScriptedReplica(name="m/0"), other_replicas=[ScriptedReplica(name="m/1")])
    _ = stage.app
    first, second = stage.models["m"].router.members
    async with stage.client(None) as client:
        first.draining = True
        assert (await client.get("/health/ready")).json() == {"status": "ready", "not_serving": []}
        second.draining = True
        ready = await client.get("/health/ready")  # the other model serves
        assert (ready.status_code, ready.json()["not_serving"]) == (200, ["m"])
        for member in stage.models["org/other"].router.members:
            member.draining = True
        unready = await client.get("/health/ready")
        assert unready.status_code == 503
        assert unready.json()["reason"] == "no replica of m, org/other serves"
        assert (await client.get("/health/live")).status_code == 200


def test_names_that_are_nothing_find_nothing() -> None:
    models = Models()
    assert models.choose_remote(["m"], tenant()) is None
    assert models.choose_remote("m", tenant()) is None
    with pytest.raises(KeyError):
        _ = models["m"]
