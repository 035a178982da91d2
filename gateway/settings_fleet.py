"""What may be set about replicas: engines of our own, servers elsewhere, and who gets what."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gateway.settings_section import Section, variable_name
from gateway.settings_units import AutoIsNone, DurationS, Whole
from policies.batching import Batching, BatchingMode

RemoteEngine = Literal["vllm", "sglang", "llama.cpp", "forebay", "openai"]

_URL = re.compile(r"https?://[^/\s?#@]+(/[^\s?#]*)?")
_EVENTS_URL = re.compile(r"(tcp://[^/\s]+:[0-9]{1,5}|ipc://\S+)")
_SERVED_NAME = re.compile(r"[^\s\x00-\x1f]{1,256}")
_POLICY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def _has_good_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


KNOWS_SALTS: frozenset[RemoteEngine] = frozenset({"vllm", "sglang", "forebay"})
"""Engines whose prompt cache keeps tenants apart when they are told whose a request is."""
CACHE_CAN_BE_OFF: frozenset[RemoteEngine] = frozenset({"llama.cpp"})
"""Engines without salts that can be asked not to use their prompt cache."""


class ReplicaSettings(Section):
    """How a model's engines run: `in-process` is a thread of the gateway, `process` a process of
    its own that is started again when it dies. `threads` None ("auto"): chosen from the machine's
    cores. A worker that tells nothing for `hang_s` is taken for hung."""

    kind: Literal["in-process", "process"] = "in-process"
    count: Annotated[Whole, Field(ge=1, le=64)] = 1
    threads: Annotated[Annotated[Whole, Field(ge=1, le=1024)] | None, AutoIsNone] = None
    hang_s: Annotated[DurationS, Field(ge=1)] = 5.0

    @model_validator(mode="after")
    def _only_workers_hang(self) -> ReplicaSettings:
        if self.kind != "process" and "hang_s" in self.model_fields_set:
            raise ValueError("hang_s is for kind: process")
        return self


class BatchingSettings(Section):
    """How a model's engines let requests in; see `policies.batching`. A batch has up to `size`
    sequences; `window_ms` None: the mode's own. Both are for batches that nobody joins."""

    mode: BatchingMode = BatchingMode.CONTINUOUS
    size: Annotated[Whole, Field(ge=1, le=1024)] = 8
    window_ms: Annotated[float, Field(ge=0, le=600_000)] | None = None

    @model_validator(mode="after")
    def _only_batches_have_a_size(self) -> BatchingSettings:
        if self.mode is BatchingMode.CONTINUOUS:
            if "size" in self.model_fields_set:
                raise ValueError("size is for mode: static or dynamic")
            if self.window_ms is not None:
                raise ValueError("window_ms is for mode: static or dynamic")
        return self

    @property
    def policy(self) -> Batching:
        """As the engine takes it."""
        return Batching(
            self.mode, self.size, None if self.window_ms is None else self.window_ms / 1e3
        )


class RemoteSettings(Section):
    """One server that speaks OpenAI's API. `url` ends before `/chat/completions`; `model` is the
    name it serves the model under (None: ours). `kv_events` is where a vLLM publishes what its
    cache holds, `kv_replay` where it answers for batches that were missed.

    `shared_cache` is about engines that cannot keep tenants apart in their prompt cache: `accept`
    says that all who use this model may share it, `refuse` that they may not.
    """

    url: str
    engine: RemoteEngine = "openai"
    api_key_env: str | None = None
    model: str | None = None
    kv_events: str | None = None
    kv_replay: str | None = None
    shared_cache: Literal["refuse", "accept"] = "refuse"
    max_running: Annotated[Whole, Field(ge=1, le=65_536)] = 64

    @property
    def host(self) -> str:
        """The host and port of the URL, by which its replica is named: in lower case, and without
        the port where it is the usual one."""
        parts = urlsplit(self.url)
        return parts.netloc.lower().removesuffix(":443" if parts.scheme == "https" else ":80")

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        if not _URL.fullmatch(value) or not value.isprintable() or not _has_good_port(value):
            raise ValueError("must be a URL such as http://127.0.0.1:9001/v1, without credentials")
        return value.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _is_a_variable(cls, value: str | None) -> str | None:
        return value if value is None else variable_name(value)

    @field_validator("model")
    @classmethod
    def _is_a_served_name(cls, value: str | None) -> str | None:
        if value is not None and not _SERVED_NAME.fullmatch(value):
            raise ValueError("must be a model's name, without spaces")
        return value

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _is_a_socket(cls, value: str | None) -> str | None:
        if value is not None and not _EVENTS_URL.fullmatch(value):
            raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
        return value

    @model_validator(mode="after")
    def _keeps_tenants_apart(self) -> RemoteSettings:
        if self.kv_events is not None and self.engine != "vllm":
            raise ValueError("kv_events are published by engine: vllm only")
        if self.kv_replay is not None and self.kv_events is None:
            raise ValueError("kv_replay needs kv_events")
        if (
            self.shared_cache == "refuse"
            and self.engine not in KNOWS_SALTS
            and self.engine not in CACHE_CAN_BE_OFF
        ):
            raise ValueError(
                f"an engine of kind {self.engine} cannot keep tenants apart in its prompt cache: "
                "say shared_cache: accept if they may share it"
            )
        return self


class RoutingSettings(Section):
    """Who gets which request: a policy of forebay's or of an installed package. A request whose
    replica is lost is moved at most `moves` times, and waits at most `recovery_s` for a replica
    that is coming back, if no other serves."""

    policy: str = "predicted-ttft"
    moves: Annotated[Whole, Field(ge=0, le=16)] = 3
    recovery_s: DurationS = 20.0

    @field_validator("policy")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not _POLICY.fullmatch(value):
            raise ValueError("must be the name of a routing policy, such as predicted-ttft")
        return value
