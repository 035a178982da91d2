"""Roughly how many bytes of Redis each tenant has, in each model's blocks, over all hosts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cache.envelope import tenant_of


class Holding(NamedTuple):
    """A tenant's blocks of one identity: its name in their keys, and the tenant's tag."""

    identity: bytes
    tenant: bytes


class Census:
    """Bytes by holding: what the last count saw, and this process's stores since it began.

    What other processes store, and what Redis pushes out, shows at the next count. Quotas are for a
    tenant's holdings together. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[Holding, int] = {}
        self._since: Counter[Holding] = Counter()
        self._on_the_way: Counter[Holding] = Counter()
        self._identities: set[bytes] = set()
        self._quotas: dict[bytes, int] = {}

    def set_quotas(self, quotas: Mapping[bytes, int]) -> None:
        """The most bytes by tenant tag; tenants not named may have any number."""
        with self._lock:
            self._quotas = dict(quotas)

    def reserve(self, holding: Holding, size_bytes: int) -> bool:
        """Count a store that is about to be made, unless it exceeds the tenant's quota."""
        with self._lock:
            quota = self._quotas.get(holding.tenant)
            if quota is not None and self._used_by(holding.tenant) + size_bytes > quota:
                return False
            self._identities.add(holding.identity)
            self._on_the_way[holding] += size_bytes
            return True

    def stored(self, holding: Holding, size_bytes: int) -> None:
        """A reserved store was made."""
        with self._lock:
            self._on_the_way[holding] -= size_bytes
            self._since[holding] += size_bytes

    def give_back(self, holding: Holding, size_bytes: int) -> None:
        """A reserved store was not made."""
        with self._lock:
            self._on_the_way[holding] -= size_bytes

    def start_count(self) -> Counter[Holding]:
        """A mark to hand to `finish_count`: stores not made by now are kept beside the count."""
        with self._lock:
            return Counter(self._since)

    def finish_count(self, mark: Counter[Holding], counted: Mapping[Holding, int]) -> None:
        """Replace the last count. Stores since `mark` may be in both; the next count settles it."""
        with self._lock:
            self._counted = dict(counted)
            self._since.subtract(mark)
            self._identities.update(holding.identity for holding in counted)

    def forget(self, *, identity: bytes | None = None, tenant: bytes | None = None) -> None:
        """All blocks of this identity and this tenant were erased; None is of any."""
        with self._lock:
            for holding in self._counted.keys() | self._since.keys():
                if identity in (None, holding.identity) and tenant in (None, holding.tenant):
                    self._counted.pop(holding, None)
                    self._since.pop(holding, None)

    def by_tenant(self, identity: bytes) -> Mapping[bytes, int]:
        """Bytes of one identity by tenant tag, as far as known."""
        with self._lock:
            holdings = self._counted.keys() | self._since.keys() | self._on_the_way.keys()
            used = {each.tenant: self._used(each) for each in holdings if each.identity == identity}
            return {tenant: size for tenant, size in used.items() if size > 0}

    def _used_by(self, tenant: bytes) -> int:
        return sum(self._used(Holding(identity, tenant)) for identity in self._identities)

    def _used(self, holding: Holding) -> int:
        return self._counted.get(holding, 0) + self._since[holding] + self._on_the_way[holding]


class KeyCount:
    """Keys of one SCAN, by identity and tenant. Not thread-safe."""

    def __init__(self) -> None:
        self._keys: Counter[Holding] = Counter()
        self.samples: dict[bytes, bytes] = {}
        """One key of each identity, whose value's size stands for all of them."""

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            tenant = tenant_of(key)
            if tenant is not None:
                identity = key.split(b":", 3)[2]
                self._keys[Holding(identity, tenant)] += 1
                self.samples.setdefault(identity, key)

    def bytes_by_holding(self, value_bytes: Mapping[bytes, int]) -> dict[Holding, int]:
        """`value_bytes` holds the size of one value by identity."""
        return {
            holding: keys * value_bytes.get(holding.identity, 0)
            for holding, keys in self._keys.items()
        }
