"""Every setting as one frozen tree, validated once and passed down as values.

The tree holds what forebay does today. Keys whose feature is not built are refused by
`gateway.settings_unbuilt` before they get here; reading a file, the environment and flags into the
tree is `gateway.config_file`.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.settings_cache import (
    CacheSettings,
    SharedPrefixSettings,
    refuse_greedy_floors,
)
from gateway.settings_fleet import (
    BatchingSettings,
    RemoteSettings,
    ReplicaSettings,
    RoutingSettings,
)
from gateway.settings_redis import RedisSettings
from gateway.settings_section import Section, variable_name
from gateway.settings_tenants import (
    BatchSettings,
    DatabaseSettings,
    LedgerSettings,
    PriceSettings,
    TenantSettings,
)
from gateway.settings_units import AutoIsNone, ByteSize, DurationS, Whole

_MODEL_NAME_RULE = "must be 1 to 128 letters, digits or any of . _ : / @ + -"
_REMOTE_MODEL_KEYS = frozenset(
    {"name", "remote", "tokenizer", "max_context", "aliases", "fallbacks", "price", "max_queue_s"}
)
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
_ORIGIN = re.compile(r"\*|https?://[^/\s?#@]+")

EnvironmentVariable = Annotated[str, Field(min_length=1)]
"""The name of an environment variable, not its content."""


class TlsSettings(Section):
    """Certificate chain and private key, PEM files; both or neither."""

    cert: Path | None = None
    key: Path | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> TlsSettings:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key are needed together")
        return self


def _networks(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    networks = []
    for index, item in enumerate(value):
        try:
            networks.append(ip_network(item))
        except (ValueError, TypeError):
            raise ValueError(
                f"item {index} must be an IP address or a network such as 10.0.0.0/8"
            ) from None
    return tuple(networks)


Networks = Annotated[tuple[IPv4Network | IPv6Network, ...], BeforeValidator(_networks)]


class ServerSettings(Section):
    """Where and how the gateway listens. `*_s` are seconds, `body_limit` bytes after decoding."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[Whole, Field(ge=0, le=65_535)] = 8000
    admin_key_env: EnvironmentVariable = "FOREBAY_ADMIN_KEY"
    secret_env: EnvironmentVariable = "FOREBAY_SECRET"
    body_limit: Annotated[ByteSize, Field(ge=1024, le=1 << 31)] = 16 << 20
    drain_s: DurationS = 30.0
    keep_alive_s: Annotated[DurationS, Field(ge=1)] = 75.0
    cors_origins: tuple[str, ...] = ()
    trusted_proxies: Networks = ()
    tls: TlsSettings = TlsSettings()
    metrics: Literal["local", "admin-key", "open"] = "local"
    log_format: Literal["auto", "json", "console"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("admin_key_env", "secret_env")
    @classmethod
    def _is_a_variable(cls, value: str) -> str:
        return variable_name(value)

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, origin in enumerate(value):
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f'item {index} must be "*" or an origin such as https://example.com'
                )
        return value


def _model_path(value: Any) -> Path | Literal["bundled"] | None:
    if value is None:
        return None
    if value == "bundled":
        return "bundled"
    if isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError("must be bundled, a .gguf file or a Hugging Face directory")


class ModelSettings(Section):
    """One model, run by engines of our own (`path`) or by servers elsewhere (`remote`).

    `max_running` sequences share a step of at most `step_tokens` tokens (None ("auto"): chosen by
    the device); up to `max_waiting` more requests wait for a place before the gateway answers 503,
    and none that would wait for longer than `max_queue_s` in front of the model.
    `tokenizer` is that of a remote model: with it prefixes are followed token by token, without it
    by their text. `aliases` are other names for it; requests that no replica of it can take go to
    the first of `fallbacks` that can, and the answer's `model` says which one ran.
    """

    name: str
    path: Annotated[Literal["bundled"] | Path | None, PlainValidator(_model_path)] = None
    remote: tuple[RemoteSettings, ...] = ()
    tokenizer: Annotated[Literal["bundled"] | Path | None, PlainValidator(_model_path)] = None
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context: Annotated[Whole, Field(ge=16, le=1 << 24)] = 2048
    max_running: Annotated[Whole, Field(ge=1, le=1024)] = 16
    max_waiting: Annotated[Whole, Field(ge=0, le=100_000)] = 256
    step_tokens: Annotated[Annotated[Whole, Field(ge=16, le=1 << 20)] | None, AutoIsNone] = None
    max_queue_s: Annotated[DurationS, Field(gt=0)] = 60.0
    batching: BatchingSettings = BatchingSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    cache: CacheSettings = CacheSettings()
    price: PriceSettings = PriceSettings()

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not _MODEL_NAME.fullmatch(value):
            raise ValueError(_MODEL_NAME_RULE)
        return value

    @field_validator("aliases", "fallbacks")
    @classmethod
    def _are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if not _MODEL_NAME.fullmatch(name):
                raise ValueError(f"item {index} {_MODEL_NAME_RULE}")
        return value

    @model_validator(mode="after")
    def _runs_here_or_elsewhere(self) -> ModelSettings:
        if (self.path is None) == (not self.remote):
            raise ValueError("needs either path (run here) or remote (run elsewhere)")
        if self.remote:
            for key in sorted(self.model_fields_set - _REMOTE_MODEL_KEYS):
                raise ValueError(f"{key} is for models that run here; a remote one has its own")
            hosts = [remote.host for remote in self.remote]
            if len(set(hosts)) < len(hosts):
                raise ValueError("remote lists one host and port twice; replicas are named by them")
            if self.tokenizer is None and any(remote.kv_events for remote in self.remote):
                raise ValueError("kv_events tell of tokens: they need the model's tokenizer")
        elif self.tokenizer is not None:
            raise ValueError("tokenizer is for remote models; one that runs here brings its own")
        return self

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError("must be auto, cpu, cuda or cuda:N")
        return value

    @model_validator(mode="after")
    def _every_running_sequence_gets_a_token(self) -> ModelSettings:
        if self.step_tokens is not None and self.step_tokens < self.max_running:
            raise ValueError("step_tokens must be at least max_running")
        return self

    @model_validator(mode="after")
    def _a_batch_has_room(self) -> ModelSettings:
        if not self.batching.policy.continuous and self.batching.size > self.max_running:
            raise ValueError("batching.size must be at most max_running")
        return self


class Settings(Section):
    """The whole tree. `tenants` are those of the file; others may be made while forebay runs."""

    server: ServerSettings = ServerSettings()
    redis: RedisSettings = RedisSettings()
    database: DatabaseSettings = DatabaseSettings()
    ledger: LedgerSettings = LedgerSettings()
    batch: BatchSettings = BatchSettings()
    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1)]
    # After the models, which their validators look at.
    tenants: tuple[TenantSettings, ...] = ()
    shared_prefixes: tuple[SharedPrefixSettings, ...] = ()
    routing: RoutingSettings = RoutingSettings()

    @field_validator("models")
    @classmethod
    def _model_names_differ(cls, value: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
        _refuse_twins([model.name for model in value], "name")
        names = {model.name for model in value}
        aliases: set[str] = set()
        for index, model in enumerate(value):
            for alias in model.aliases:
                if alias in names or alias in aliases:
                    raise ValueError(f"item {index} has an alias that is another model's name")
                aliases.add(alias)
            for fallback in model.fallbacks:
                if fallback not in names or fallback == model.name:
                    raise ValueError(f"item {index} has a fallback that is no other model's name")
        return value

    @field_validator("tenants")
    @classmethod
    def _tenant_ids_differ(cls, value: tuple[TenantSettings, ...]) -> tuple[TenantSettings, ...]:
        _refuse_twins([tenant.id for tenant in value], "id")
        return value

    @field_validator("tenants")
    @classmethod
    def _tenants_name_models(
        cls, value: tuple[TenantSettings, ...], others: ValidationInfo
    ) -> tuple[TenantSettings, ...]:
        models: tuple[ModelSettings, ...] = others.data.get("models", ())
        names = {model.name for model in models}
        for index, tenant in enumerate(value):
            if names and (field := tenant.strange_model(names)) is not None:
                raise ValueError(f"item {index} has a {field} that is no model's own name")
        return value

    @field_validator("tenants")
    @classmethod
    def _floors_leave_room(
        cls, value: tuple[TenantSettings, ...], others: ValidationInfo
    ) -> tuple[TenantSettings, ...]:
        models: tuple[ModelSettings, ...] = others.data.get("models", ())
        refuse_greedy_floors([model.cache for model in models], [tenant.cache for tenant in value])
        return value

    @field_validator("shared_prefixes")
    @classmethod
    def _prefixes_have_a_model(
        cls, value: tuple[SharedPrefixSettings, ...], others: ValidationInfo
    ) -> tuple[SharedPrefixSettings, ...]:
        models: tuple[ModelSettings, ...] = others.data.get("models", ())
        for index, prefix in enumerate(value):
            if models and not any(prefix.is_for(model.name) for model in models):
                raise ValueError(f"item {index} is for none of the models")
        return value


def _refuse_twins(names: list[str], what: str) -> None:
    for index, name in enumerate(names):
        if (first := names.index(name)) != index:
            raise ValueError(f"items {first} and {index} have the same {what}")
