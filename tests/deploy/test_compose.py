"""compose.yaml: its shape, what it refers to, what it keeps secret and apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.deploy.stack import (
    PROFILES,
    compose,
    config_path,
    is_forebay,
    mounts,
    required,
    seconds,
    services,
    settings_of,
    text,
    variables,
)

Check = Callable[[Any], bool]


def texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def mapping(**keys: Check) -> Check:
    """A mapping with no other keys than these."""
    return lambda value: (
        isinstance(value, dict)
        and all(key in keys and keys[key](item) for key, item in value.items())
    )


def mapping_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def word(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def duration(value: Any) -> bool:
    return isinstance(value, str) and seconds(value) > 0


SERVICE: dict[str, Check] = {
    "image": word,
    "build": mapping(context=word, args=mapping_of(word)),
    "command": texts,
    "environment": mapping_of(word),
    "volumes": texts,
    "tmpfs": texts,
    "networks": texts,
    "ports": texts,
    "profiles": texts,
    "cpuset": word,
    "user": word,
    "depends_on": mapping_of(
        mapping(condition=lambda value: value in ("service_healthy", "service_started"))
    ),
    "healthcheck": mapping(test=texts, interval=duration, timeout=duration, start_period=duration),
    "stop_signal": lambda value: value in ("SIGTERM", "SIGQUIT", "SIGINT"),
    "stop_grace_period": duration,
    "read_only": lambda value: value is True,
    "cap_drop": lambda value: value == ["ALL"],
    "security_opt": lambda value: value == ["no-new-privileges:true"],
    "restart": lambda value: value == "unless-stopped",
    "deploy": lambda value: isinstance(value, dict) and set(value) == {"resources"},
}
"""The part of the compose specification that the file uses, and how far each key may go."""

EVERYWHERE = ("image", "networks", "read_only", "cap_drop", "security_opt", "restart")


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_every_key_is_known_and_has_its_shape(profile: str) -> None:
    tree = compose(profile)
    assert {key for key in tree if not key.startswith("x-")} == {"services", "networks", "volumes"}
    for name, service in services(profile).items():
        for key, value in service.items():
            assert key in SERVICE, f"{name}.{key}"
            assert SERVICE[key](value), f"{name}.{key}: {value}"
        assert set(EVERYWHERE) <= set(service), name


def test_what_is_named_is_there(profile: str) -> None:
    tree, running = compose(profile), services(profile)
    used = set()
    for name, service in running.items():
        assert set(service["networks"]) <= set(tree["networks"]), name
        assert set(service.get("depends_on", {})) <= set(running), name
        for mount in mounts(service):
            if mount.file is None:
                used.add(mount.source)
            else:
                assert mount.file.exists(), f"{name}: {mount.source}"
                assert mount.read_only, f"{name}: {mount.source}"
    assert used <= set(tree["volumes"])
    assert profile != "gpu" or used == set(tree["volumes"])


def test_who_is_waited_for_says_when_it_is_healthy(profile: str) -> None:
    running = services(profile)
    for name, service in running.items():
        for other, wait in service.get("depends_on", {}).items():
            if wait["condition"] == "service_healthy" and not is_forebay(running[other]):
                assert "healthcheck" in running[other], f"{name} waits for {other}"


def test_images_are_pinned(profile: str) -> None:
    for service in services(profile).values():
        name, _, tag = service["image"].partition(":")
        assert name
        assert re.search(r"\d|^(cpu|gpu)$", tag), service["image"]
        assert ("build" in service) == is_forebay(service)


def test_no_secret_is_in_the_file(profile: str) -> None:
    secrets = {
        value
        for service in services(profile).values()
        for name, value in service.get("environment", {}).items()
        if re.search("KEY|SECRET|PASSWORD", name)
    }
    assert secrets == {f"{name.lower()}-of-the-test" for name in required()}
    # Anything else that is asked for has a default, so that forgetting it is no surprise.
    assert {operator for name, operator in variables() if name not in required()} == {":-"}


def test_the_databases_password_is_in_no_file_and_the_same_on_both_ends(profile: str) -> None:
    running = services(profile)
    password = running["postgres"]["environment"]["POSTGRES_PASSWORD"]
    assert password == "database_password-of-the-test"
    for name in ("gateway-1", "gateway-2"):
        url = urlsplit(settings_of(name, profile).database.url)
        assert (url.scheme, url.hostname, url.port) == ("postgresql", "postgres", 5432)
        assert url.password == password
        assert url.username == running["postgres"]["environment"]["POSTGRES_USER"]
        assert url.path == "/" + running["postgres"]["environment"]["POSTGRES_DB"]
        assert "database" not in config_path(running[name]).read_text()
    assert not re.search(r"://[^/\s]*:[^$/\s]+@", text())


def test_postgres_keeps_its_data_and_is_asked_as_its_clients_ask(profile: str) -> None:
    postgres = services(profile)["postgres"]
    [data] = mounts(postgres)
    assert data.file is None
    assert data.target == "/var/lib/postgresql/data"
    words = postgres["healthcheck"]["test"]
    probe = dict(zip(words[3::2], words[4::2], strict=True))
    assert probe == {
        "--host": "127.0.0.1",
        "--username": postgres["environment"]["POSTGRES_USER"],
        "--dbname": postgres["environment"]["POSTGRES_DB"],
    }
    assert postgres["networks"] == ["back"]


def test_the_file_says_how_to_make_what_it_requires() -> None:
    [names] = re.findall(r"#\s+for name in ([A-Z_ ]+); do", text())
    assert set(names.split()) == required()


def test_nothing_is_reached_from_other_machines_or_past_the_proxy(profile: str) -> None:
    published = {
        name: port
        for name, service in services(profile).items()
        for port in service.get("ports", [])
    }
    assert set(published) == {"proxy", "grafana"}
    assert all(port.startswith("127.0.0.1:") for port in published.values())
    assert compose(profile)["networks"]["back"] == {"internal": True}
    for name, service in services(profile).items():
        if name.startswith("worker") or name in ("valkey", "postgres", "prometheus"):
            assert service["networks"] == ["back"], name


def test_a_stop_leaves_time_to_drain_in_the_order_of_the_stream(profile: str) -> None:
    running = services(profile)
    for name, service in running.items():
        if is_forebay(service):
            drain_s = settings_of(name, profile).server.drain_s
            assert seconds(service["stop_grace_period"]) >= drain_s + 10, name
            assert seconds(running["proxy"]["stop_grace_period"]) >= drain_s + 10
    assert running["proxy"]["stop_signal"] == "SIGQUIT"
    # Who depends on another is stopped before it.
    for name in ("gateway-1", "gateway-2"):
        assert name in running["proxy"]["depends_on"]
        assert {"worker-1", "worker-2", "valkey", "postgres"} <= set(running[name]["depends_on"])


def test_workers_have_cores_of_their_own_and_the_gpu_is_asked_for() -> None:
    running = services("gpu")
    assert running["worker-1"]["cpuset"] != running["worker-2"]["cpuset"]
    [device] = running["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert "worker-gpu" not in services("cpu")
    assert running["worker-gpu"]["image"] != running["worker-1"]["image"]


def test_ours_keep_what_cannot_be_had_again_each_for_itself(profile: str) -> None:
    """Workers the kernels built for their cores; gateways rows of the ledger that the database has
    not taken yet."""
    kept_by = {}
    for name, service in services(profile).items():
        if is_forebay(service):
            assert config_path(service).is_file()
            [volume] = [mount for mount in mounts(service) if mount.file is None]
            assert volume.target == "/var/lib/forebay"
            kept_by[volume.source] = name
    assert all(volume == name for volume, name in kept_by.items())
    assert {"gateway-1", "gateway-2"} <= set(kept_by)


def test_valkey_pushes_out_kv_alone_and_within_bounds() -> None:
    command = services()["valkey"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=False))
    assert options["--maxmemory-policy"] == "volatile-lru"
    assert options["--maxmemory"] == "2gb"
