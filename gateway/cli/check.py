"""`forebay check`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.settings import ModelSettings
from gateway.settings_cache import CacheSettings
from gateway.settings_redis import EMBEDDED, OFF, shown_url
from gateway.settings_tenants import TenantSettings


def check(config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]) -> None:
    """Validate a configuration file and say what it amounts to."""
    # It takes longer to import than most commands run, so not when another one is asked for.
    from gateway.embedded_redis import how_to_get_it
    from gateway.reload import ConfigSource

    settings = ConfigSource(config, os.environ, {}).load().settings
    server = settings.server
    scheme = "https" if server.tls.cert else "http"
    typer.echo(f"{config}: valid")
    typer.echo(f"listens on {scheme}://{server.host}:{server.port}, metrics: {server.metrics}")
    redis = settings.redis
    apart = "" if redis.kv_url is None else f", KV in {shown_url(redis.kv_url)}"
    typer.echo(f"redis {shown_url(redis.url)}{apart}")
    lacking = how_to_get_it() if EMBEDDED in (redis.url, redis.for_kv) else None
    if lacking is not None:
        typer.echo(f"no embedded Redis on this machine, it will be done without: {lacking}")
    kv_in_redis = redis.for_kv != OFF and (redis.for_kv != EMBEDDED or lacking is None)
    for model in settings.models:
        typer.echo(f"model {model.name}: {_described(model, kv_in_redis=kv_in_redis)}")
    for tenant in settings.tenants:
        typer.echo(
            f"tenant {tenant.id}: {len(tenant.keys)} key(s), models {', '.join(tenant.models)}, "
            f"{tenant.service_class}, weight {tenant.weight:g}, {_limits(tenant)}, "
            f"{_promise(tenant)}, cache {tenant.cache.scope}"
        )
    if not settings.tenants:
        typer.echo(
            "no tenants: only those that `forebay tenants create` makes are let in, and that needs "
            f"{server.admin_key_env} to be set for the server"
        )


def _limits(tenant: TenantSettings) -> str:
    """What it may use."""
    limits = tenant.limits
    named = {
        "requests/min": limits.rpm,
        "tokens/min": limits.tpm,
        "at once": limits.concurrency,
    }
    said = [f"{value} {unit}" for unit, value in named.items() if value is not None]
    if (budget := limits.budget_usd) is not None:
        said.append(f"{budget.amount} USD a {budget.per}")
    return "limits " + ", ".join(said) if said else "no limits"


def _promise(tenant: TenantSettings) -> str:
    """What it was promised."""
    slo = tenant.slo
    named = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms}
    said = [f"{name} {value:g} ms" for name, value in named.items() if value is not None]
    if not said:
        return "nothing promised"
    return f"promised {' and '.join(said)} for {slo.target:.4g} of requests, else {slo.on_overload}"


def _described(model: ModelSettings, *, kv_in_redis: bool) -> str:
    if model.remote:
        servers = ", ".join(f"{remote.engine} at {remote.url}" for remote in model.remote)
        followed = "text" if model.tokenizer is None else "tokens"
        return f"{servers}, prefixes followed by their {followed}"
    replicas = model.replicas
    return (
        f"{model.path}, {replicas.count} replica(s) {replicas.kind}, device {model.device}, "
        f"dtype {model.dtype}, context {model.max_context}, batch {model.max_running}, "
        f"KV on {', '.join(_tiers(model.cache, kv_in_redis=kv_in_redis))}"
    )


def _tiers(cache: CacheSettings, *, kv_in_redis: bool) -> list[str]:
    """The tiers that are switched on for a model."""
    on = {"device": True, "DRAM": cache.dram > 0, "Redis": cache.redis and kv_in_redis}
    return [name for name, here in on.items() if here]
