"""What a worker is to run, and with what."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cache.redis_options import RedisOptions
from gateway.replicas.worker.messages import CoreShare, Open, Shares
from gateway.replicas.worker.process import PROGRAM
from gateway.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """The same for every life of a worker.

    It is number `index` of `count` workers that share the machine's GPUs, and computes on `cores`
    (`share_cores`). `redis` is where its KV may go. `environ` is what its process sees, without
    the gateway's own settings; keys that others should not see are not to be in it.
    """

    model: ModelSettings
    cores: CoreShare
    environ: Mapping[str, str] = field(repr=False)
    redis: RedisOptions | None = None
    index: int = 0
    count: int = 1
    program: Sequence[str] = PROGRAM

    def message(self, replica: str, shares: Shares | None) -> Open:
        """The order as a worker is told it."""
        return Open(
            name=replica,
            model=self.model.model_dump_json(exclude_unset=True).encode(),
            redis=self.redis,
            index=self.index,
            count=self.count,
            cores=self.cores,
            shares=shares,
            log_level=_log_level(),
        )


def _log_level() -> str:
    """The least level that this process logs, so that nothing is written in vain."""
    level = logging.getLogger().getEffectiveLevel()
    named = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
    return next((name for name, number in named.items() if level <= number), "error")
