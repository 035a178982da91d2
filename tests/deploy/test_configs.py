"""The configurations of the stack: they load, and gateways and workers fit together."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
import yaml

from gateway.settings import Settings
from tests.deploy.stack import PROFILES, ROOT, config_path, is_forebay, services, settings_of

GATEWAYS = ("gateway-1", "gateway-2")


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def ours(profile: str) -> dict[str, Settings]:
    return {
        name: settings_of(name, profile)
        for name, service in services(profile).items()
        if is_forebay(service)
    }


def test_every_configuration_is_some_services_and_loads() -> None:
    used = {
        config_path(service)
        for profile in PROFILES
        for name, service in services(profile).items()
        if is_forebay(service) and settings_of(name, profile).models
    }
    assert used == set((ROOT / "deploy" / "forebay").glob("*.yaml"))


def test_gateways_reach_every_worker_as_it_listens(profile: str) -> None:
    running, settings = services(profile), ours(profile)
    workers = {name for name in settings if name not in GATEWAYS}
    for gateway in GATEWAYS:
        for model in settings[gateway].models:
            hosts = set()
            for remote in model.remote:
                url = urlsplit(remote.url)
                host = url.hostname or ""
                hosts.add(host)
                worker = settings[host]
                assert (url.port, url.path) == (worker.server.port, "/v1")
                assert set(running[gateway]["networks"]) & set(running[host]["networks"])
                assert (remote.model or model.name) in {served.name for served in worker.models}
                assert remote.api_key_env in running[gateway]["environment"]
                keys = {key.env for tenant in worker.tenants for key in tenant.keys}
                assert remote.api_key_env in keys
            assert hosts == workers


def test_gateways_run_no_engine_and_share_what_they_must(profile: str) -> None:
    settings, running = ours(profile), services(profile)
    assert settings["gateway-1"] == settings["gateway-2"]
    assert all(model.path is None for model in settings["gateway-1"].models)
    assert len({each.redis.url for each in settings.values()}) == 1
    assert len({running[name]["environment"]["FOREBAY_SECRET"] for name in settings}) == 1
    url = urlsplit(settings["gateway-1"].redis.url)
    assert url.hostname == "valkey"
    # a worker's rows are of the gateways' key, and are nobody's bill
    assert all(settings[name].database.url == "sqlite" for name in settings.keys() - set(GATEWAYS))


def test_the_demo_tenant_is_held_to_something(profile: str) -> None:
    [tenant] = ours(profile)["gateway-1"].tenants
    limits = tenant.limits.as_limits()
    assert None not in (limits.rpm, limits.tpm, limits.concurrency, limits.budget_nusd)
    assert tenant.slo.as_slo().promises
    assert all(model.price.output > 0 for model in ours(profile)["gateway-1"].models)


def test_the_gpu_fleet_differs_in_its_extra_replica_alone() -> None:
    trees = [
        yaml.safe_load(config_path(services(profile)["gateway-1"]).read_text())
        for profile in PROFILES
    ]
    remotes = [tree["models"][0].pop("remote") for tree in trees]
    assert trees[0] == trees[1]
    assert remotes[1][:-1] == remotes[0]
    assert "worker-gpu" in remotes[1][-1]["url"]


def test_everybody_in_the_stack_may_be_scraped(profile: str) -> None:
    assert {each.server.metrics for each in ours(profile).values()} == {"open"}
    assert {each.server.host for each in ours(profile).values()} == {"0.0.0.0"}
