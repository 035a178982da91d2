"""Roughly how many bytes of Redis each tenant has, over all models and hosts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from cache.envelope import tenant_of


class Census:
    """Bytes by tenant tag: what the last count saw, and this process's stores since it began.

    What other processes store shows at the next count; what is stored twice counts twice until
    then. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[bytes, int] = {}
        self._since: Counter[bytes] = Counter()
        self._on_the_way: Counter[bytes] = Counter()
        self._quotas: dict[bytes, int] = {}

    def set_quotas(self, quotas: Mapping[bytes, int]) -> None:
        """The most bytes by tenant tag; tenants not named may have any number."""
        with self._lock:
            self._quotas = dict(quotas)

    def reserve(self, tenant: bytes, size_bytes: int) -> bool:
        """Count a store that is about to be made, unless it exceeds the tenant's quota."""
        with self._lock:
            quota = self._quotas.get(tenant)
            if quota is not None and self._used(tenant) + size_bytes > quota:
                return False
            self._on_the_way[tenant] += size_bytes
            return True

    def stored(self, tenant: bytes, size_bytes: int) -> None:
        """A reserved store was made."""
        with self._lock:
            self._on_the_way[tenant] -= size_bytes
            self._since[tenant] += size_bytes

    def give_back(self, tenant: bytes, size_bytes: int) -> None:
        """A reserved store was not made."""
        with self._lock:
            self._on_the_way[tenant] -= size_bytes

    def start_count(self) -> Counter[bytes]:
        """A mark to hand to `finish_count`: stores not made by now are kept beside the count."""
        with self._lock:
            return Counter(self._since)

    def finish_count(self, mark: Counter[bytes], counted: Mapping[bytes, int]) -> None:
        """Replace the last count. Stores since `mark` may be in both; the next count settles it."""
        with self._lock:
            self._counted = dict(counted)
            self._since.subtract(mark)

    def forget(self, tenant: bytes) -> None:
        """All of a tenant's blocks were erased."""
        with self._lock:
            self._counted.pop(tenant, None)
            self._since.pop(tenant, None)

    def by_tenant(self) -> Mapping[bytes, int]:
        """Bytes by tenant tag, as far as known."""
        with self._lock:
            tenants = self._counted.keys() | self._since.keys() | self._on_the_way.keys()
            used = {tenant: self._used(tenant) for tenant in tenants}
            return {tenant: size for tenant, size in used.items() if size > 0}

    def _used(self, tenant: bytes) -> int:
        return self._counted.get(tenant, 0) + self._since[tenant] + self._on_the_way[tenant]


class KeyCount:
    """Keys of one SCAN, by identity and tenant. Not thread-safe."""

    def __init__(self) -> None:
        self._keys: Counter[tuple[bytes, bytes]] = Counter()
        self.samples: dict[bytes, bytes] = {}
        """One key of each identity, whose value's size stands for all of them."""

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            tenant = tenant_of(key)
            if tenant is not None:
                identity = key.split(b":", 3)[2]
                self._keys[identity, tenant] += 1
                self.samples.setdefault(identity, key)

    def bytes_by_tenant(self, value_bytes: Mapping[bytes, int]) -> dict[bytes, int]:
        """`value_bytes` holds the size of one value by identity."""
        sums: Counter[bytes] = Counter()
        for (identity, tenant), keys in self._keys.items():
            sums[tenant] += keys * value_bytes.get(identity, 0)
        return dict(sums)
