"""What the configuration says about keys and secrets, resolved to what the gateway compares."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from gateway.database.address import EMBEDDED, database_secrets
from gateway.settings import Settings
from gateway.settings_errors import ConfigError
from gateway.settings_fleet import RemoteSettings
from gateway.settings_redis import url_secrets
from gateway.settings_tenants import TenantSettings
from gateway.state_dir import StateDir
from gateway.tenants import KeyFacts, KeyRing, Tenant, TenantCache, hash_key, key_id

_WORKERS_OWN = frozenset({"FOREBAY_CACHE_DIR", "FOREBAY_NATIVE", "FOREBAY_NATIVE_ISA"})
_SHORTEST_SECRET = 16
"""Characters of a secret or a key; of a shorter one the operator is warned."""
_DATABASE_PASSWORD = "PGPASSWORD"
"""What a PostgreSQL URL without a password is taken to mean."""
_OWN = re.compile(rf"FOREBAY_[A-Z0-9]+__|{_DATABASE_PASSWORD}$")
"""Settings, of which some are URLs with passwords, and the database's password."""
_LIKE_A_KEY = re.compile(r".*(KEY|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIALS?)", re.IGNORECASE)


def build_key_ring(settings: Settings, environ: Mapping[str, str]) -> KeyRing:
    """Every tenant's keys. Raises ConfigError for an unset variable or a key used twice."""
    mistakes: list[str] = []
    keys: list[tuple[str, Tenant, KeyFacts]] = []
    tenants: list[Tenant] = []
    holder_of: dict[str, str] = {}
    for tenant_index, entry in enumerate(settings.tenants):
        tenant = tenant_of(entry)
        tenants.append(tenant)
        for key_index, key in enumerate(entry.keys):
            place = f"tenants[{tenant_index}].keys[{key_index}]"
            hashed = key.hash
            if key.env is not None:
                plain = environ.get(key.env, "").strip()
                if not plain:
                    mistakes.append(f"{key.env}: is not set, and {place} takes its key from it")
                    continue
                hashed = hash_key(plain)
            if hashed is None:
                raise AssertionError("a validated key has a hash or a variable")
            if hashed in holder_of:
                mistakes.append(f"{place}: is the same key as {holder_of[hashed]}")
                continue
            holder_of[hashed] = place
            keys.append((hashed, tenant, KeyFacts(key_id(hashed), key.limits.as_limits())))
    if mistakes:
        raise ConfigError(mistakes)
    return KeyRing(keys, tenants)


def server_secret(settings: Settings, environ: Mapping[str, str]) -> bytes:
    """The variable that `server.secret_env` names, else the state directory's own secret.

    Raises ConfigError when the variable is set but empty: an empty secret protects nothing.
    """
    variable = settings.server.secret_env
    if variable not in environ:
        return StateDir.open(environ).server_secret()
    secret = environ[variable].strip()
    if not secret:
        raise ConfigError([f"{variable}: is set but empty; unset it or make it long and random"])
    return secret.encode()


def weakness_of_secret(settings: Settings, environ: Mapping[str, str]) -> str | None:
    """Why a server secret from the environment is too weak, without anything of it; None if nothing
    can be said against it."""
    variable = settings.server.secret_env
    secret = environ.get(variable, "").strip()
    if not secret or len(secret) >= _SHORTEST_SECRET:
        return None
    return (
        f"{variable} has fewer than {_SHORTEST_SECRET} characters: who sees a salt, or what Redis "
        "holds, can find it by trying, and then read sealed KV and speak for any tenant; "
        "`openssl rand -hex 32` makes a better one"
    )


def weak_keys(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """For each variable that holds a key for this gateway which is too short, why that is bad,
    without anything of it. Of keys that the configuration has by their hash nothing can be told."""
    tenants = [key.env for tenant in settings.tenants for key in tenant.keys if key.env]
    variables = dict.fromkeys([settings.server.admin_key_env, *tenants])
    lengths = {variable: len(environ.get(variable, "").strip()) for variable in variables}
    return [
        f"{variable} has fewer than {_SHORTEST_SECRET} characters: who tries can find it; "
        "`forebay keys create` makes a better one"
        for variable, length in lengths.items()
        if 0 < length < _SHORTEST_SECRET
    ]


def admin_key(
    settings: Settings, environ: Mapping[str, str], *, embedded: bool = False
) -> str | None:
    """The operator's key, None if there is none.

    `embedded`, there is no configuration file: then the key is made once in the state directory
    where the variable is not set. Raises ConfigError if `server.metrics` needs a key and there is
    none, and if the state directory cannot be used.
    """
    variable = settings.server.admin_key_env
    key = environ.get(variable, "").strip()
    if key:
        return key
    if embedded:
        return StateDir.open(environ).admin_key()
    if settings.server.metrics == "admin-key":
        raise ConfigError([f"{variable}: is not set, and server.metrics is admin-key"])
    return None


def admin_key_digest(
    settings: Settings, environ: Mapping[str, str], *, embedded: bool = False
) -> bytes | None:
    """SHA-256 of `admin_key`, with its arguments and errors."""
    key = admin_key(settings, environ, embedded=embedded)
    return None if key is None else hashlib.sha256(key.encode()).digest()


def known_secrets(settings: Settings, environ: Mapping[str, str]) -> frozenset[str]:
    """Every secret that is known in the clear, so that logs can be kept free of it."""
    variables = [settings.server.secret_env, settings.server.admin_key_env]
    variables += [key.env for tenant in settings.tenants for key in tenant.keys if key.env]
    remotes = [remote for model in settings.models for remote in model.remote]
    variables += [remote.api_key_env for remote in remotes if remote.api_key_env]
    secrets = {secret for variable in variables if (secret := environ.get(variable, "").strip())}
    if settings.database.url != EMBEDDED and (password := environ.get(_DATABASE_PASSWORD)):
        secrets.add(password)
    return frozenset(secrets | _store_passwords(settings))


def remote_key(remote: RemoteSettings, environ: Mapping[str, str]) -> str | None:
    """The key for a remote server, None if it wants none. Raises ConfigError where the variable
    that should hold it does not."""
    if remote.api_key_env is None:
        return None
    key = environ.get(remote.api_key_env, "").strip()
    if not key:
        raise ConfigError([f"{remote.api_key_env}: is not set, and {remote.url} needs it as a key"])
    return key


def is_gateways_own(variable: str, settings: Settings) -> bool:
    """Whether this variable holds a secret of the gateway's own, or may: the server's, the
    operator's key, a tenant's, a setting such as a URL with a password, or the database's."""
    return bool(variable in _own_keys(settings) or _OWN.match(variable))


def remote_environ(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Where keys for remote servers may come from: not this gateway's own secrets, nor its tenants'
    keys, which whoever adds a server could have sent there."""
    keys = _own_keys(settings)
    secrets = _store_passwords(settings) | _store_urls(settings)
    return {
        name: value
        for name, value in environ.items()
        if name not in keys and not _OWN.match(name) and value.strip() not in secrets
    }


def _own_keys(settings: Settings) -> set[str]:
    """Variables with the server's secret, the operator's key and tenants' keys."""
    own = {settings.server.secret_env, settings.server.admin_key_env}
    return own | {key.env for tenant in settings.tenants for key in tenant.keys if key.env}


def _store_passwords(settings: Settings) -> frozenset[str]:
    """Of the database and of Redis."""
    redis = settings.redis
    passwords = url_secrets(redis.url) | url_secrets(redis.for_kv)
    return passwords | database_secrets(settings.database.url)


def _store_urls(settings: Settings) -> frozenset[str]:
    """Those of the database's and Redis's that may hold a password."""
    urls = (settings.database.url, settings.redis.url, settings.redis.for_kv)
    return frozenset(url for url in urls if "@" in url)


def check_remote_keys(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raises ConfigError, with a line for each, where remote servers' keys are not set."""
    mistakes: list[str] = []
    environ = remote_environ(settings, environ)
    for model in settings.models:
        for remote in model.remote:
            try:
                remote_key(remote, environ)
            except ConfigError as error:
                mistakes += error.messages
    if mistakes:
        raise ConfigError(list(dict.fromkeys(mistakes)))


def worker_environ(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker's process may see: neither the gateway's settings nor anybody's keys.

    It reads files and computes, and needs no key whatever. So a variable whose name ends like a
    key's is left out too: a reload may make it one, and so may whoever adds a server. The same goes
    for another variable that holds a secret which is known.
    """
    hidden = {settings.server.secret_env, settings.server.admin_key_env}
    hidden |= {key.env for tenant in settings.tenants for key in tenant.keys if key.env}
    hidden |= {r.api_key_env for model in settings.models for r in model.remote if r.api_key_env}
    secrets = known_secrets(settings, environ) | _store_urls(settings)
    return {
        name: value
        for name, value in environ.items()
        if name not in hidden
        and value.strip() not in secrets
        and not _LIKE_A_KEY.fullmatch(name)
        and (not name.startswith("FOREBAY_") or name in _WORKERS_OWN)
    }


def tenant_of(entry: TenantSettings) -> Tenant:
    """A tenant's settings as they are enforced."""
    cache = entry.cache
    return Tenant(
        id=entry.id,
        models=entry.models,
        limits=entry.limits.as_limits(),
        model_limits={name: own.as_limits() for name, own in entry.limits.models.items()},
        cached_weight=entry.limits.cached_weight,
        enqueued_tokens=entry.limits.enqueued_tokens,
        service_class=entry.service_class,
        weight=entry.weight,
        slo=entry.slo.as_slo(),
        sees_receipt=entry.receipt,
        cache=TenantCache(
            scope=cache.scope,
            device_floor_bytes=cache.device_floor,
            device_quota_bytes=cache.device_quota,
            dram_floor_bytes=cache.dram_floor,
            dram_quota_bytes=cache.dram_quota,
            redis_quota_bytes=cache.redis_quota,
        ),
    )
