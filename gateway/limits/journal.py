"""What a gateway has let in by itself and Redis is yet to be told, summed up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.limits.calls import BudgetPart, Count, Operation, Spend
from policies.limit_window import WindowShape

_MOST_COSTS = 128


class Journal:
    """One tenant's requests that are over, by account and bucket. Bounded: what is older than a
    window has no use there, and costs of a long outage are kept less finely."""

    def __init__(self, shape: WindowShape) -> None:
        self._shape = shape
        self._windows: dict[str, dict[int, list[int]]] = {}
        self._costs: dict[BudgetPart, dict[int, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._windows.values())) + sum(map(len, self._costs.values()))

    def count(self, accounts: Iterable[str], bucket: int, requests: int, tokens: int) -> None:
        """Requests that came in this bucket."""
        for account in accounts:
            buckets = self._windows.setdefault(account, {})
            counts = buckets.get(bucket)
            if counts is None:
                for old in [each for each in buckets if each < bucket - self._shape.buckets]:
                    del buckets[old]
                counts = buckets[bucket] = [0, 0]
            counts[0] += requests
            counts[1] += tokens

    def spend(self, parts: Sequence[BudgetPart], cost_nusd: int, at_s: float) -> None:
        """What a request has cost that was settled at this time."""
        if not cost_nusd:
            return
        bucket = self._shape.bucket(at_s)
        for part in parts:
            costs = self._costs.setdefault(part, {})
            costs[bucket] = costs.get(bucket, 0) + cost_nusd
            if len(costs) > _MOST_COSTS:
                oldest, next_one = sorted(costs)[:2]
                costs[next_one] += costs.pop(oldest)

    def recount(self, account: str, counts: Iterable[tuple[int, int, int]]) -> None:
        """Bucket, requests and tokens of all that an account's requests that are over have used,
        instead of what was noted here."""
        self._windows[account] = {
            bucket: [requests, tokens] for bucket, requests, tokens in counts if requests or tokens
        }

    def drain(self) -> list[Operation]:
        """All of it, to be told, and forgotten here."""
        width_s = self._shape.width_us / 1e6
        operations: list[Operation] = [
            Count(account, (bucket + 1) * width_s, requests, tokens)
            for account, buckets in self._windows.items()
            for bucket, (requests, tokens) in buckets.items()
        ]
        operations += [
            Spend(part, cost, (bucket + 1) * width_s)
            for part, costs in self._costs.items()
            for bucket, cost in costs.items()
        ]
        self._windows.clear()
        self._costs.clear()
        return operations
