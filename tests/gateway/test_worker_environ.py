"""What of the gateway's environment its worker processes see, and servers elsewhere may be sent."""

from __future__ import annotations

from gateway.credentials import remote_environ, worker_environ
from gateway.settings import Settings

SETTINGS = Settings.model_validate(
    {
        "server": {"secret_env": "SEAL", "admin_key_env": "BOSS"},
        "redis": {"url": "redis://:redis-password@cache:6379/0"},
        "models": [
            {"name": "m", "path": "bundled"},
            {
                "name": "far",
                "remote": [{"url": "http://h:1/v1", "engine": "vllm", "api_key_env": "HOSTED"}],
            },
        ],
        "tenants": [{"id": "a", "keys": [{"env": "ACME"}]}],
    }
)


def test_keys_of_the_configuration_stay_here() -> None:
    environ = {"SEAL": "s-1", "BOSS": "b-1", "HOSTED": "h-1", "ACME": "a-1", "PATH": "/bin"}
    assert worker_environ(SETTINGS, environ) == {"PATH": "/bin"}


def test_so_does_what_a_reload_may_make_a_key() -> None:
    named = ("BETA_KEY", "hf_token", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "X_CREDENTIALS")
    environ = {**dict.fromkeys(named, "value"), "CUDA_VISIBLE_DEVICES": "0", "KEYBOARD": "us"}
    assert worker_environ(SETTINGS, environ) == {"CUDA_VISIBLE_DEVICES": "0", "KEYBOARD": "us"}


def test_so_does_a_known_secret_under_another_name() -> None:
    environ = {"ACME": "a-1", "COPY": "a-1\n", "CACHE_AUTH": "redis-password", "LANG": "C"}
    environ["CACHE_URL"] = SETTINGS.redis.url
    assert worker_environ(SETTINGS, environ) == {"LANG": "C"}


def test_of_our_own_variables_those_about_the_machine_go_along() -> None:
    machine = {"FOREBAY_CACHE_DIR": "/c", "FOREBAY_NATIVE": "off", "FOREBAY_NATIVE_ISA": "portable"}
    environ = {**machine, "FOREBAY_REDIS__URL": "redis://:pw@h", "FOREBAY_LISTEN_FDS": "5"}
    assert worker_environ(SETTINGS, environ) == machine


def test_no_server_is_sent_a_secret_of_the_gateways_own() -> None:
    """Whoever adds a server says which variable holds its key."""
    url = "postgresql://forebay:database-password@db/forebay"
    settings = SETTINGS.model_copy(
        update={"database": SETTINGS.database.model_copy(update={"url": url})}
    )
    environ = {
        "SEAL": "s-1",
        "BOSS": "b-1",
        "ACME": "a-1",
        "FOREBAY_DATABASE__URL": url,
        "FOREBAY_REDIS__KV_URL": "redis://:kv-password@kv",
        "FOREBAY_DATABASE__URL_OF_YESTERDAY": "postgresql://forebay:older@db/forebay",
        "PGPASSWORD": "another",
        "COPY_OF_THE_URL": url,
        "DATABASE_PASSWORD": "database-password",
        "CACHE_AUTH": "redis-password",
        "HOSTED": "h-1",
        "FOREBAY_WORKER_KEY": "w-1",
    }
    assert remote_environ(settings, environ) == {"HOSTED": "h-1", "FOREBAY_WORKER_KEY": "w-1"}
