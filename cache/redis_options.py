"""How to reach Redis, and how much of it to use."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from redis.asyncio.connection import parse_url

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Where Redis is and what may be asked of it.

    `url` is redis://, rediss:// (TLS, verified against `tls_ca` or the system's authorities) or
    unix://. `cluster` True asks for a cluster; False finds out. `timeout_s` bounds every control
    command; loads bring their own deadlines. Stores larger than `max_value_bytes` are not made, and
    at most `queue_bytes` of them wait. `secret` is the server's: what different gateways that share
    this Redis must agree on. Raises ValueError, naming the field, for what cannot be.
    """

    url: str = field(repr=False)  # may hold a password
    secret: bytes = field(repr=False)
    cluster: bool = False
    timeout_s: float = 0.05
    max_connections: int = 4
    ttl_s: float = 7 * 86400.0
    max_value_bytes: int = 64 * MIB
    queue_bytes: int = 256 * MIB
    encrypt: bool = False
    tls_ca: str | None = None

    def __post_init__(self) -> None:
        try:
            parse_url(self.url)
        except ValueError:
            # Without the cause: its text may quote the URL, and the URL a password.
            raise ValueError("url: must begin with redis://, rediss:// or unix://") from None
        if not self.secret:
            raise ValueError("secret: must not be empty")
        if self.cluster and self.url.startswith("unix://"):
            raise ValueError("cluster: not over a unix socket")
        if self.tls_ca is not None and not os.access(self.tls_ca, os.R_OK):
            raise ValueError(f"tls_ca: {self.tls_ca} cannot be read")
        if self.max_connections < 3:
            raise ValueError("max_connections: must be at least 3 (control, stores, loads)")
        if self.timeout_s <= 0 or self.ttl_s < 1:
            raise ValueError("timeout_s and ttl_s: must be positive, ttl_s at least 1")
        if self.max_value_bytes <= 0 or self.queue_bytes <= 0:
            raise ValueError("max_value_bytes and queue_bytes: must be positive")

    @property
    def location(self) -> str:
        """Where Redis is, without user, password or parameters: fit for a log."""
        parts = parse_url(self.url)
        if "path" in parts:
            return f"unix://{parts['path']}"
        scheme = self.url.split("://", 1)[0]
        return f"{scheme}://{parts.get('host', 'localhost')}:{parts.get('port', 6379)}"
