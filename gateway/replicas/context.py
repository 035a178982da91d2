"""What all of a gateway's engines share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    core_shares: deque[CoreShare] = field(repr=False)
    """Those that no worker has now, in the order in which they are taken."""

    @contextmanager
    def core_share(self, settings: ModelSettings) -> Iterator[CoreShare]:
        """A worker's part for as long as the scope lasts; one more than was planned for shares the
        cores of all."""
        if not self.core_shares:
            yield CoreShare((), settings.replicas.threads or 1)
            return
        share = self.core_shares.popleft()
        try:
            yield share
        finally:
            self.core_shares.append(share)
