"""What all of a gateway's engines share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cache.directory import Directory
from gateway.metrics import Metrics
from gateway.redis_services import RedisServices
from gateway.replicas.worker.messages import CoreShare
from gateway.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class LocalContext:
    """What all of a gateway's engines share. Worker processes see `worker_environ`, and each takes
    its part of the machine from `core_shares`."""

    secret: bytes
    redis: RedisServices
    directory: Directory
    metrics: Metrics
    worker_environ: Mapping[str, str] = field(repr=False)
    core_shares: Iterator[CoreShare] = field(repr=False)

    def core_share(self, settings: ModelSettings) -> CoreShare:
        """The next worker's part; one more than was planned for shares the cores of all."""
        return next(self.core_shares, CoreShare((), settings.replicas.threads or 1))
