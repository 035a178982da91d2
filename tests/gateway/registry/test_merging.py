"""The file and what was made at run time, one over the other, whichever changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import structlog

from gateway.metrics import Metrics
from gateway.reload import ConfigSource, Reloader, RuntimeConfig, refuse_restart_changes
from gateway.settings_cache import TenantCacheSettings
from gateway.settings_errors import ConfigError
from gateway.tenants import hash_key
from tests.gateway.database.both import Place
from tests.gateway.registry.gateways import deed, following, snapshot, tenant, until


@pytest.fixture
def sqlite(tmp_path: Path) -> Place:
    return Place("sqlite", {"FOREBAY_STATE_DIR": str(tmp_path / "state")})


async def test_the_file_gains_a_tenant_that_was_made_at_run_time(sqlite: Place) -> None:
    async with sqlite.open() as database, following(database) as gateway:
        await gateway.registry.create_tenant(tenant("beta", weight=2), deed())
        made = await gateway.registry.create_key("beta", deed())
        beta = {"id": "beta", "weight": 5, "keys": [{"hash": hash_key("beta's in the file")}]}
        with structlog.testing.capture_logs() as logs:
            gateway.runtime.replace(snapshot({"id": "acme"}, beta))
        assert [entry["tenant"] for entry in logs] == ["beta"]
        ring = gateway.runtime.current.key_ring
        for key in (made.plain, "beta's in the file"):
            assert ring.identify(f"Bearer {key}").tenant.weight == 5
        assert [each.id for each in gateway.runtime.current.settings.tenants] == ["acme", "beta"]
        # and when the file has it no longer, what was made at run time counts again
        with structlog.testing.capture_logs() as logs:
            gateway.runtime.replace(snapshot({"id": "acme"}))
        assert logs == []
        assert gateway.runtime.current.key_ring.identify(f"Bearer {made.plain}").tenant.weight == 2


async def test_keys_of_a_tenant_that_left_the_file_wait_for_it(sqlite: Place) -> None:
    async with sqlite.open() as database, following(database) as gateway:
        made = await gateway.registry.create_key("acme", deed())
        gateway.runtime.replace(snapshot({"id": "beta"}))
        assert not gateway.admits(made.plain)
        assert gateway.runtime.problems == {made.record.id: "its tenant is not there"}
        gateway.runtime.replace(snapshot())
        assert gateway.admits(made.plain)
        assert gateway.runtime.problems == {}


async def test_a_key_in_both_places_is_the_files(sqlite: Place) -> None:
    async with sqlite.open() as database, following(database) as gateway:
        await gateway.registry.create_tenant(tenant("beta"), deed())
        made = await gateway.registry.create_key("beta", deed())
        file = snapshot({"id": "acme", "keys": [{"hash": hash_key(made.plain)}]})
        gateway.runtime.replace(file)
        assert gateway.who(made.plain) == "acme"
        assert "has the same key" in gateway.runtime.problems[made.record.id]


async def test_at_a_start_a_tenant_that_does_not_fit_is_left_out_rather_than_the_file(
    sqlite: Place,
) -> None:
    roomy = snapshot({"id": "acme"}, cache={"dram": "100MiB"})
    async with sqlite.open() as database:
        async with following(database, roomy) as gateway:
            await gateway.registry.create_tenant(
                tenant("beta", cache={"dram_floor": "40MiB"}), deed()
            )
            await gateway.registry.create_tenant(
                tenant("gamma", cache={"dram_floor": "1MiB"}), deed()
            )
        tight = snapshot({"id": "acme"}, cache={"dram": "10MiB"})
        async with following(database, tight) as gateway:
            assert {each.id for each in gateway.runtime.current.settings.tenants} == {
                "acme",
                "gamma",
            }
            assert gateway.runtime.problems["beta"].startswith("cache: every dram_floor")


class Reloading:
    """A gateway with a file that can be rewritten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write()
        source = ConfigSource(path, {}, {})
        self.runtime = RuntimeConfig(source.load())
        self.metrics = Metrics(models=["m"], tenants=["acme"], secret=b"s")
        self.reloader = Reloader(source, self.runtime, self.metrics)

    def write(self, tenants: str = "[{id: acme}]", model: str = "") -> None:
        self.path.write_text(
            f"models: [{{name: m, path: bundled, cache: {{dram: 10MiB}}, {model}}}]\n"
            f"tenants: {tenants}\n"
        )


async def test_a_reload_keeps_what_was_made_at_run_time_and_the_other_way_round(
    sqlite: Place, tmp_path: Path
) -> None:
    running = Reloading(tmp_path / "forebay.yaml")
    applied: list[list[str]] = []

    async def apply(settings: object) -> None:
        applied.append([each.id for each in running.runtime.current.settings.tenants])
        assert settings is running.runtime.current.settings

    running.reloader.on_change(apply)
    told = {"follow": running.reloader.catch_up, "on_tenants": running.metrics.set_tenants}
    async with (
        sqlite.open() as database,
        following(database, runtime=running.runtime, **told) as gateway,
    ):
        await gateway.registry.create_tenant(tenant("beta"), deed())
        made = await gateway.registry.create_key("beta", deed())
        await until(lambda: applied == [["acme", "beta"]])
        running.write("[{id: acme}, {id: gamma}]")
        assert await running.reloader.reload()
        assert applied[1:] == [["acme", "gamma", "beta"]]
        assert running.runtime.current.key_ring.identify(f"Bearer {made.plain}").tenant.id == "beta"
        await gateway.registry.create_key("gamma", deed())
        with running.metrics.in_flight("beta"):
            assert 'forebay_in_flight{tenant="beta"} 1.0' in running.metrics.render().decode()
        await gateway.registry.delete_tenant("beta", deed(), unknown=False)
        await until(lambda: applied[2:] == [["acme", "gamma"]])
        assert "beta" not in running.metrics.render().decode()


async def test_a_file_that_would_put_a_tenant_out_of_use_is_refused(
    sqlite: Place, tmp_path: Path
) -> None:
    running = Reloading(tmp_path / "forebay.yaml")
    async with sqlite.open() as database, following(database, runtime=running.runtime) as gateway:
        await gateway.registry.create_tenant(tenant("beta", cache={"dram_floor": "4MiB"}), deed())
        running.write("[{id: acme, cache: {dram_floor: 2MiB}}]")
        with structlog.testing.capture_logs() as logs:
            assert not await running.reloader.reload()
        [entry] = logs
        assert entry["reason"].startswith("tenant beta, made at run time: cache: every dram_floor")
        assert len(running.runtime.current.settings.tenants) == 2
        running.write("[{id: acme, cache: {dram_floor: 1MiB}}]")
        assert await running.reloader.reload()
        [acme, beta] = running.runtime.current.settings.tenants
        assert acme.cache == TenantCacheSettings(dram_floor=1 << 20)
        assert beta.id == "beta"


async def test_both_change_at_the_same_moment(sqlite: Place, tmp_path: Path) -> None:
    running = Reloading(tmp_path / "forebay.yaml")
    async with sqlite.open() as database, following(database, runtime=running.runtime) as gateway:
        for number in range(5):
            running.write(f"[{{id: acme, weight: {number + 1}}}]")
            await asyncio.gather(
                running.reloader.reload(),
                gateway.registry.create_tenant(tenant(f"t{number}"), deed()),
            )
            [acme, *others] = running.runtime.current.settings.tenants
            assert acme.weight == number + 1
            assert [each.id for each in others] == [f"t{index}" for index in range(number + 1)]


def test_prices_need_no_restart_and_another_database_does(tmp_path: Path) -> None:
    running = Reloading(tmp_path / "forebay.yaml")
    old = running.runtime.file.settings
    running.write(model="price: {input: 1}")
    refuse_restart_changes(old, ConfigSource(running.path, {}, {}).load().settings)
    environ = {"FOREBAY_DATABASE__URL": "postgresql://me:pw@h/db"}
    with pytest.raises(ConfigError, match=r"^database\.url: needs a restart to change$"):
        refuse_restart_changes(old, ConfigSource(running.path, environ, {}).load().settings)
