"""Reloading: all or nothing, the last good configuration kept, and a record of what happened."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.metrics import Metrics
from gateway.reload import ConfigSource, Reloader, RuntimeConfig, refuse_restart_changes
from gateway.settings_errors import ConfigError
from gateway.tenants import TenantCache, hash_key


def text(
    *,
    key: str = "key-1",
    tenant: str = "acme",
    server: str = "",
    model: str = "",
    more: str = "",
) -> str:
    return (
        f"server: {{drain_s: 1, {server}}}\n"
        f"models: [{{name: m, path: bundled, {model}}}]\n"
        f'tenants: [{{id: {tenant}, keys: [{{hash: "{hash_key(key)}"}}]}}]\n{more}'
    )


class Running:
    """A configuration in use, and its file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text(text())
        self.source = ConfigSource(path, {}, {})
        self.config = RuntimeConfig(self.source.load())
        self.metrics = Metrics(models=["m"], tenants=["acme"], secret=b"s")
        self.reloader = Reloader(self.source, self.config, self.metrics)

    def knows(self, key: str) -> bool:
        try:
            self.config.current.key_ring.identify(f"Bearer {key}")
        except ApiError:
            return False
        return True

    def reloads(self, result: str) -> float:
        name = f'forebay_config_reloads_total{{result="{result}"}}'
        [line] = [line for line in self.metrics.render().decode().splitlines() if name in line]
        return float(line.split()[-1])


def test_all_keys_that_are_not_set_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    remote = "{name: far, remote: [{url: 'http://h/v1', engine: vllm, api_key_env: FAR}]}"
    path.write_text(
        f"models: [{remote}]\ntenants: [{{id: a, keys: [{{env: OURS}}]}}]\n"
        "server: {metrics: admin-key}\n"
    )
    with pytest.raises(ConfigError) as caught:
        ConfigSource(path, {}, {}).load()
    names = [line.split(":")[0] for line in caught.value.messages]
    assert names == ["FAR", "OURS", "FOREBAY_ADMIN_KEY"]


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path / "forebay.yaml")


async def test_a_good_file_is_put_to_use(running: Running) -> None:
    before = running.config.current
    running.path.write_text(text(key="key-2", tenant="beta", server="metrics: open"))
    assert await running.reloader.reload()
    assert running.knows("key-2")
    assert not running.knows("key-1")
    assert running.config.current.settings.server.metrics == "open"
    assert before.settings.server.metrics == "local"  # whoever holds it is judged by it
    assert (running.reloads("success"), running.reloads("failure")) == (1, 0)
    with running.metrics.in_flight("beta"):
        assert 'forebay_in_flight{tenant="beta"} 1.0' in running.metrics.render().decode()


async def test_quotas_and_shared_prefixes_are_put_to_use(running: Running) -> None:
    written = text(more="shared_prefixes: [{text: once}]")
    running.path.write_text(
        written.replace("id: acme,", "id: acme, cache: {scope: user, dram_quota: 1MiB},")
    )
    assert await running.reloader.reload()
    current = running.config.current
    assert current.settings.shared_prefixes[0].text == "once"
    tenant = current.key_ring.identify("Bearer key-1").tenant
    assert tenant.cache == TenantCache(scope="user", dram_quota_bytes=1 << 20)


@pytest.mark.parametrize(
    "broken",
    [
        "server: {",
        text(key="key-2", server="prot: 1"),
        text(key="key-2", server="port: 9"),  # needs a restart
        text(key="key-2", model="dtype: float32"),
        text(key="key-2").replace("hash:", "env: UNSET_VARIABLE #"),
        "",
    ],
)
async def test_a_bad_file_changes_nothing(running: Running, broken: str) -> None:
    before = running.config.current
    running.path.write_text(broken)
    assert not await running.reloader.reload()
    assert running.config.current is before
    assert running.knows("key-1")
    assert (running.reloads("success"), running.reloads("failure")) == (0, 1)


async def test_a_bug_in_reading_does_not_end_the_watch(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watching = asyncio.create_task(running.reloader.watch(interval_s=0.01))
    with monkeypatch.context() as patched:
        patched.setattr("gateway.reload.load_settings", lambda *_: 1 / 0)
        running.path.write_text(text(key="key-two"))
        await until(lambda: running.reloads("failure") == 1)
    running.path.write_text(text(key="key-333"))
    try:
        await until(lambda: running.knows("key-333"))
    finally:
        watching.cancel()
    assert "ZeroDivisionError" in "".join(capsys.readouterr())


async def test_a_file_that_is_gone_changes_nothing(running: Running) -> None:
    running.path.unlink()
    assert not await running.reloader.reload()
    assert running.knows("key-1")


async def test_a_file_that_could_not_be_read_is_read_once_it_can_be(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = Path.open, [True]

    def open_file(path: Path, *arguments: Any, **options: Any) -> Any:
        if broken and path == running.path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **options)

    running.path.write_text(text(key="key-two"))
    monkeypatch.setattr(Path, "open", open_file)
    watching = asyncio.create_task(running.reloader.watch(interval_s=0.01))
    try:
        await until(lambda: running.reloads("failure") == 1)
        await asyncio.sleep(0.05)
        assert running.reloads("failure") == 1  # said once, not at every look
        broken.clear()  # which changes nothing of the file
        await until(lambda: running.knows("key-two"))
    finally:
        watching.cancel()


async def test_at_the_end_nothing_is_begun(running: Running) -> None:
    applied: list[object] = []

    async def apply(settings: object) -> None:
        applied.append(settings)

    running.reloader.on_change(apply)
    running.path.write_text(text(key="key-two"))
    running.reloader.end()
    assert not await running.reloader.reload()
    await running.reloader.catch_up()
    assert (applied, running.knows("key-1")) == ([], True)
    assert (running.reloads("success"), running.reloads("failure")) == (0, 0)


def test_what_needs_a_restart_is_named(running: Running, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(
        text(
            server="host: 0.0.0.0, secret_env: X, body_limit: 1MiB",
            model="max_context: 64, cache: {device: 1MiB, dram: off}",
            more="redis: {url: 'redis://:secret@h', ttl: 1d}",
        )
    )
    old = running.config.current.settings
    new = ConfigSource(other, {}, {}).load().settings
    with pytest.raises(ConfigError) as caught:
        refuse_restart_changes(old, new)
    assert caught.value.messages == tuple(
        f"{key}: needs a restart to change"
        for key in (
            "server.host",
            "server.secret_env",
            "redis.url",
            "redis.ttl",
            "models[0].max_context",
            "models[0].cache.device",
            "models[0].cache.dram",
        )
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what changes is a file, which sets no event
            await asyncio.sleep(0.01)


async def test_a_change_is_noticed_also_when_the_file_is_replaced(running: Running) -> None:
    watching = asyncio.create_task(running.reloader.watch(interval_s=0.01))
    try:
        running.path.write_text(text(key="key-two"))
        await until(lambda: running.knows("key-two"))

        replacement = running.path.with_suffix(".new")
        replacement.write_text(text(key="key-333"))
        os.replace(replacement, running.path)
        await until(lambda: running.knows("key-333"))

        running.path.unlink()
        await asyncio.sleep(0.05)
        assert running.knows("key-333")
        running.path.write_text("server: {")
        await until(lambda: running.reloads("failure") == 1)
        await asyncio.sleep(0.05)
        assert running.reloads("failure") == 1  # said once, not at every look
        running.path.write_text(text(key="key-4444"))
        await until(lambda: running.knows("key-4444"))
    finally:
        watching.cancel()


async def test_what_a_fleet_can_follow_needs_no_restart(tmp_path: Path) -> None:
    two = 'name: n, remote: [{url: "http://a/v1", engine: vllm}]'
    before = text(model="aliases: [x]", more="routing: {policy: random}\n")
    before = before.replace("{name: m,", f"{{{two}}}, {{name: m,")
    after = before.replace("http://a/", "http://b/").replace("aliases: [x]", "fallbacks: [n]")
    after = after.replace("fallbacks", "replicas: {count: 2}, fallbacks").replace(
        "random", "round-robin"
    )
    (tmp_path / "a").write_text(before)
    (tmp_path / "b").write_text(after)
    old, new = (ConfigSource(tmp_path / name, {}, {}).load().settings for name in "ab")
    refuse_restart_changes(old, new)
    assert new.models[1].replicas.count == 2


async def test_a_fleet_that_cannot_follow_is_said_so_and_the_watch_goes_on(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    async def apply(_: object) -> None:
        raise RuntimeError("no such GPU")

    running.reloader.on_change(apply)
    running.path.write_text(text(key="key-2"))
    assert not await running.reloader.reload()
    assert running.knows("key-2")  # keys are in use all the same
    assert running.reloads("failure") == 1
    assert "no such GPU" in "".join(capsys.readouterr())


async def test_a_key_is_revoked_while_the_fleet_is_still_following(running: Running) -> None:
    """Draining and loading replicas takes minutes."""
    told: list[object] = []
    drained = asyncio.Event()

    async def apply(settings: object) -> None:
        told.append(settings)
        await drained.wait()

    running.reloader.on_change(apply)
    watching = asyncio.create_task(running.reloader.watch(interval_s=0.01))
    try:
        running.path.write_text(text(key="key-two"))
        await until(lambda: len(told) == 1)
        running.path.write_text(text(key="key-333"))
        await until(lambda: running.knows("key-333") and not running.knows("key-two"))
        assert len(told) == 1
        drained.set()
        await until(lambda: running.reloads("success") == 2)
    finally:
        watching.cancel()
    assert told[1:] == [running.config.current.settings]


async def test_what_was_reloaded_before_there_was_a_fleet_is_made_up_for(running: Running) -> None:
    told: list[object] = []

    async def apply(settings: object) -> None:
        told.append(settings)

    running.path.write_text(text(key="key-2"))
    assert await running.reloader.reload()
    running.reloader.on_change(apply)
    watching = asyncio.create_task(running.reloader.watch(interval_s=0.01))
    try:
        await until(lambda: bool(told))
        await asyncio.sleep(0.05)
    finally:
        watching.cancel()
    assert told == [running.config.current.settings]


def test_a_remote_servers_key_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text(
        text().replace(
            "path: bundled,", 'remote: [{url: "http://a/v1", engine: vllm, api_key_env: BIG}]'
        )
    )
    with pytest.raises(ConfigError, match="BIG: is not set, and http://a/v1 needs it as a key"):
        ConfigSource(path, {}, {}).load()
    ConfigSource(path, {"BIG": "a-key-0123456789"}, {}).load()


def test_our_own_secrets_are_no_keys_for_others(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    remote = 'remote: [{url: "http://a/v1", engine: vllm, api_key_env: FOREBAY_SECRET}]'
    path.write_text(text().replace("path: bundled,", remote))
    with pytest.raises(ConfigError, match="FOREBAY_SECRET: is not set"):
        ConfigSource(path, {"FOREBAY_SECRET": "a secret of the server's"}, {}).load()
