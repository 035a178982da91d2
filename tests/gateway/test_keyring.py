"""Keys from the configuration to the tenant that a request belongs to."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway.credentials import (
    admin_key_digest,
    build_key_ring,
    known_secrets,
    server_secret,
    weak_keys,
    weakness_of_secret,
    worker_environ,
)
from gateway.errors import ApiError
from gateway.settings import Settings
from gateway.settings_errors import ConfigError
from gateway.settings_redis import RedisSettings
from gateway.settings_tenants import DatabaseSettings
from gateway.tenants import Caller, KeyFacts, KeyRing, Tenant, hash_key
from policies.limits import Limits


def settings_of(*tenants: dict[str, Any], **server: Any) -> Settings:
    return Settings.model_validate(
        {
            "models": [{"name": "m", "path": "bundled"}],
            "tenants": list(tenants) or [{"id": "a", "keys": [{"hash": hash_key("key-a")}]}],
            "server": server,
        }
    )


def test_every_key_leads_to_its_tenant() -> None:
    settings = settings_of(
        {"id": "a", "keys": [{"hash": hash_key("a-1")}, {"env": "A_2"}], "models": ["x-*"]},
        {
            "id": "b",
            "keys": [{"env": "B"}],
            "limits": {"concurrency": 2},
            "cache": {"scope": "none"},
        },
    )
    ring = build_key_ring(settings, {"A_2": "a-2", "B": "b-1\n"})
    tenant = ring.identify("Bearer a-2").tenant
    assert ring.identify("bearer a-1").tenant is tenant
    assert (tenant.id, tenant.limits.concurrency) == ("a", None)
    assert tenant.may_use("x-1")
    assert not tenant.may_use("y")
    other = ring.identify("Bearer b-1").tenant
    assert (other.id, other.limits.concurrency, other.cache_scope) == ("b", 2, "none")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic a-1", "a-1", "Bearer \udcff", "Bearer wrong-key"],
)
def test_anything_else_is_a_401_that_does_not_echo(header: str | None) -> None:
    ring = build_key_ring(settings_of(), {})
    with pytest.raises(ApiError) as caught:
        ring.identify(header)
    assert caught.value.status == 401
    assert "wrong-key" not in caught.value.message


def test_an_unset_variable_and_a_shared_key_are_named() -> None:
    settings = settings_of(
        {"id": "a", "keys": [{"env": "UNSET"}, {"env": "EMPTY"}, {"hash": hash_key("same")}]},
        {"id": "b", "keys": [{"env": "B"}]},
    )
    with pytest.raises(ConfigError) as caught:
        build_key_ring(settings, {"B": "same", "EMPTY": " "})
    assert caught.value.messages == (
        "UNSET: is not set, and tenants[0].keys[0] takes its key from it",
        "EMPTY: is not set, and tenants[0].keys[1] takes its key from it",
        "tenants[1].keys[0]: is the same key as tenants[0].keys[2]",
    )


def test_the_server_secret_comes_from_its_variable_or_the_state_directory(tmp_path: Any) -> None:
    settings = settings_of(secret_env="MY_SECRET")
    assert server_secret(settings, {"MY_SECRET": "s3"}) == b"s3"
    with pytest.raises(ConfigError, match=r"^MY_SECRET: is set but empty"):
        server_secret(settings, {"MY_SECRET": ""})
    environ = {"FOREBAY_STATE_DIR": str(tmp_path)}
    assert server_secret(settings, environ) == server_secret(settings, environ) != b""


def test_the_admin_key_is_required_only_where_it_guards_something() -> None:
    assert admin_key_digest(settings_of(), {}) is None
    assert admin_key_digest(settings_of(), {"FOREBAY_ADMIN_KEY": "k"}) == bytes.fromhex(
        hash_key("k").removeprefix("sha256:")
    )
    with pytest.raises(ConfigError, match=r"^FOREBAY_ADMIN_KEY: is not set"):
        admin_key_digest(settings_of(metrics="admin-key"), {})


def test_known_secrets_are_all_that_the_environment_holds() -> None:
    settings = settings_of({"id": "a", "keys": [{"env": "A"}]})
    environ = {"A": "key-a", "FOREBAY_SECRET": "sec", "FOREBAY_ADMIN_KEY": "adm", "OTHER": "x"}
    assert known_secrets(settings, environ) == {"key-a", "sec", "adm"}


def test_passwords_in_redis_urls_are_known_secrets() -> None:
    redis = {"url": "redis://:first%2F@h", "kv_url": "rediss://me:second@h"}
    settings = settings_of().model_copy(update={"redis": RedisSettings.model_validate(redis)})
    assert known_secrets(settings, {}) == {"first%2F", "first/", "second"}


@pytest.mark.parametrize(("secret", "weak"), [("s" * 15, True), ("s" * 16, False), (None, False)])
def test_a_short_secret_is_said_to_be_weak_and_not_shown(secret: str | None, weak: bool) -> None:
    environ = {} if secret is None else {"MY_SECRET": f" {secret} "}
    said = weakness_of_secret(settings_of(secret_env="MY_SECRET"), environ)
    assert (said is not None) == weak
    if said is not None:
        assert said.startswith("MY_SECRET has fewer than 16 characters")
        assert "sss" not in said


def test_each_short_key_is_said_to_be_weak_and_not_shown() -> None:
    settings = settings_of({"id": "a", "keys": [{"env": "A"}, {"env": "B"}, {"env": "UNSET"}]})
    environ = {"A": " aaa-bbb ", "B": "b" * 16, "FOREBAY_ADMIN_KEY": "x7"}
    said = weak_keys(settings, environ)
    assert [line.split()[0] for line in said] == ["FOREBAY_ADMIN_KEY", "A"]
    assert all("fewer than 16 characters" in line for line in said)
    assert not any("aaa" in line or "x7" in line for line in said)


def test_a_tenant_sees_its_receipts_unless_it_is_not_to() -> None:
    one = {"id": "a", "keys": [{"env": "A"}]}
    other = {"id": "b", "keys": [{"env": "B"}], "receipt": "off"}
    ring = build_key_ring(settings_of(one, other), {"A": "key-a", "B": "key-b"})
    assert ring.identify("Bearer key-a").tenant.sees_receipt
    assert not ring.identify("Bearer key-b").tenant.sees_receipt


def test_the_databases_password_is_a_known_secret() -> None:
    settings = settings_of()
    database = DatabaseSettings(url="postgresql://me:first%2F@h/db?sslpassword=second")
    settings = settings.model_copy(update={"database": database})
    environ = {"PGPASSWORD": "third", "PGUSER": "me"}
    assert known_secrets(settings, environ) == {"first%2F", "first/", "second", "third"}
    assert known_secrets(settings_of(), environ) == set()  # an embedded one has none
    assert "PGPASSWORD" not in worker_environ(settings, environ)


def test_a_ring_is_joined_with_more_keys_and_stays_itself() -> None:
    ring = build_key_ring(settings_of(), {})
    more = Tenant("b")
    facts = KeyFacts("key-b", Limits(rpm=1))
    joined = ring.joined([(hash_key("key-b"), more, facts)], [more])
    assert joined.identify("Bearer key-b") == Caller(more, facts)
    assert joined.identify("Bearer key-a").tenant.id == "a"
    assert set(joined.tenants) == {"a", "b"}
    assert joined.has(hash_key("key-b"))
    with pytest.raises(ApiError):
        ring.identify("Bearer key-b")
    assert not ring.has(hash_key("key-b"))
    with pytest.raises(ValueError, match="listed twice"):
        joined.joined([(hash_key("key-a"), more, facts)], [])


def test_a_key_that_has_expired_lets_nobody_in() -> None:
    tenant = Tenant("a")
    ends = {"old": time.time() - 1, "new": time.time() + 60, "ever": None}
    ring = KeyRing(
        [
            (hash_key(name), tenant, KeyFacts(f"key-{name}", expires_s=at))
            for name, at in ends.items()
        ]
    )
    for name in ("new", "ever"):
        assert ring.identify(f"Bearer {name}").tenant is tenant
        assert ring.caller(f"key-{name}") is not None
    with pytest.raises(ApiError) as caught:
        ring.identify("Bearer old")
    assert (caught.value.status, caught.value.message) == (401, "This API key is not valid.")
    assert ring.caller("key-old") is None
    assert ring.caller("key-none") is None
    assert set(ring.callers) == {"key-old", "key-new", "key-ever"}
