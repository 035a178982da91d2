"""What may be set about prompt caching: a model's tiers, a tenant's share, shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from gateway.settings_section import Section
from gateway.settings_units import AutoIsNone, ByteSize, OffIsZero, Switch, Whole


class CacheSettings(Section):
    """A model's KV. Sizes are bytes, per replica.

    `device` is the pool that it computes in; None ("auto"): a share of free GPU memory, or 512 MiB
    on a CPU. `dram` is what holds blocks pushed out of there (0: nothing does); `redis` whether
    they may go on to Redis. `write` says when blocks come down: `back` when the device runs short,
    `through` as soon as they are full. `block_tokens` is a page's size, a multiple of the 16 tokens
    that are hashed.
    """

    block_tokens: Annotated[Whole, Field(ge=16, le=1024)] = 16
    device: Annotated[Annotated[ByteSize, Field(ge=1)] | None, AutoIsNone] = None
    dram: Annotated[ByteSize, OffIsZero] = 1 << 30
    redis: Switch = True
    write: Literal["back", "through"] = "back"

    @field_validator("block_tokens")
    @classmethod
    def _is_whole_hash_blocks(cls, value: int) -> int:
        if value % 16:
            raise ValueError("must be a multiple of 16")
        return value


class TenantCacheSettings(Section):
    """A tenant's part in the caches. `scope`: within what its prompts share KV: the tenant, each of
    its users, or nothing.

    A floor is what other tenants cannot push out of a tier, a quota the most that it may hold there
    (None: no quota), in bytes: per replica, and over the whole fleet in Redis.
    """

    scope: Literal["tenant", "user", "none"] = "tenant"
    device_floor: ByteSize = 0
    device_quota: ByteSize | None = None
    dram_floor: ByteSize = 0
    dram_quota: ByteSize | None = None
    redis_quota: ByteSize | None = None

    @model_validator(mode="after")
    def _floors_fit_quotas(self) -> Self:
        if self.device_quota is not None and self.device_floor > self.device_quota:
            raise ValueError("device_floor must not be more than device_quota")
        if self.dram_quota is not None and self.dram_floor > self.dram_quota:
            raise ValueError("dram_floor must not be more than dram_quota")
        return self


class PrefixMessage(Section):
    """One message of a shared prefix."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Field(min_length=1)]


class SharedPrefixSettings(Section):
    """A prefix that every tenant may hit, on the models whose names match one of the patterns.

    Once loaded it has either `text`, with which a completion's prompt begins, or `messages`, with
    which a chat begins. `file` is another way to write `text`: it is read with the configuration
    (`gateway.config_file`), and None from then on.
    """

    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    text: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[tuple[PrefixMessage, ...], Field(min_length=1)] | None = None
    file: Path | None = None

    @model_validator(mode="after")
    def _has_one_content(self) -> Self:
        if self.file is not None or (self.text is None) == (self.messages is None):
            raise ValueError("must have exactly one of text, messages and file")
        return self

    def is_for(self, model: str) -> bool:
        """Whether one of the patterns matches the model's name."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)


def refuse_greedy_floors(
    caches: Sequence[CacheSettings], shares: Sequence[TenantCacheSettings]
) -> None:
    """Raises ValueError if the tenants' floors together take more than half of a tier.

    What is not promised to anybody is what all tenants' running requests move in: with less than
    half of it left, a busy tenant could not run although memory lies idle. Tiers that are off, or
    whose size is only known once the model is loaded, are not judged here.
    """
    device = sum(share.device_floor for share in shares)
    dram = sum(share.dram_floor for share in shares)
    for index, cache in enumerate(caches):
        if cache.device is not None and 2 * device > cache.device:
            raise ValueError(_greedy("device", index))
        if cache.dram and 2 * dram > cache.dram:
            raise ValueError(_greedy("dram", index))


def _greedy(tier: str, index: int) -> str:
    return f"every {tier}_floor together is more than half of models[{index}].cache.{tier}"
