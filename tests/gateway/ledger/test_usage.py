"""Sums over the ledger against sums by hand, on both databases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.ledger import usage as usage_module
from gateway.ledger.group_by import GroupBy
from gateway.ledger.row import LedgerRow
from gateway.ledger.usage import PERCENTILES, Percentiles, TooManyGroups, Usage, UsageQuery
from tests.gateway.database.both import KINDS, place
from tests.gateway.ledger.rows import opened, row

START_S = 1_800_000_000.0 - 1_800_000_000 % 86_400


def some_rows(count: int = 400) -> list[LedgerRow]:
    """Two days of three tenants, with ties, gaps, and everything that may be missing."""
    random = Random(7)
    rows = [
        row(
            finished_s=START_S + random.choice([0, 3600, 86_399.999, random.uniform(0, 172_800)]),
            tenant=random.choice(["acme", "acme", "beta", "gamma"]),
            model=random.choice(["m", "large"]),
            key=random.choice(["key-1", "key-2"]),
            service_class=random.choice(["standard", "batch"]),
            outcome=random.choice(["success", "success", "cancelled", "error"]),
            prompt_tokens=random.randrange(1000),
            cached_dram_tokens=random.randrange(100),
            cost_nusd=random.randrange(1 << 50),
            ttft_s=random.choice([None, 0.1, 0.25, random.random()]),
            tpot_s=random.choice([None, random.random() / 10]),
            publish_s=None,
            met_slo=random.choice([None, True, True, False]),
        )
        for _ in range(count)
    ]
    storage = {"kind": "storage", "ttft_s": None, "tpot_s": None, "met_slo": None, "key": ""}
    zero = {"prompt_tokens": 0, "cached_device_tokens": 0, "cached_dram_tokens": 0}
    nothing = {"cached_redis_tokens": 0, "written_tokens": 0, "output_tokens": 0}
    for hour in range(3):
        finished_s = START_S + hour * 3600 + 1
        rows.append(
            row(finished_s=finished_s, token_hours=1.5, cost_nusd=7, **storage, **zero, **nothing)
        )
    return rows


def percentiles(values: Iterable[float | None]) -> Percentiles:
    known = sorted(value for value in values if value is not None)
    if not known:
        return Percentiles({})
    return Percentiles({p: known[ceil(len(known) * p / 100) - 1] for p in PERCENTILES})


def by_hand(rows: list[LedgerRow], tenant: str | None, group: Any) -> Usage:
    storage = [each for each in rows if each.kind == "storage"]

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in rows)

    return Usage(
        tenant=tenant,
        group=group,
        requests=Counter(each.outcome for each in rows if each.kind == "request"),
        prompt_tokens=total("prompt_tokens"),
        cached_device_tokens=total("cached_device_tokens"),
        cached_dram_tokens=total("cached_dram_tokens"),
        cached_redis_tokens=total("cached_redis_tokens"),
        written_tokens=total("written_tokens"),
        output_tokens=total("output_tokens"),
        token_hours=total("token_hours"),
        cost_nusd=total("cost_nusd"),
        storage_nusd=sum(each.cost_nusd for each in storage),
        promised=sum(each.met_slo is not None for each in rows),
        met=sum(each.met_slo is True for each in rows),
        ttft=percentiles(each.ttft_s for each in rows),
        tpot=percentiles(each.tpot_s for each in rows),
        publish=percentiles(each.publish_s for each in rows),
    )


GROUPS: dict[GroupBy | None, Callable[[LedgerRow], Any]] = {
    None: lambda each: None,
    GroupBy.MODEL: lambda each: each.model,
    GroupBy.KEY: lambda each: each.key,
    GroupBy.SERVICE_CLASS: lambda each: each.service_class,
    GroupBy.HOUR: lambda each: int(each.finished_s // 3600) * 3600,
    GroupBy.DAY: lambda each: int(each.finished_s // 86_400) * 86_400,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_sums_are_those_by_hand(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rows = some_rows()
    async with opened(place(kind, tmp_path, request)) as here:
        for each in rows:
            here.ledger.note(each)
        for group_by, name_of in GROUPS.items():
            for tenant, by_tenant in ((None, True), (None, False), ("acme", False)):
                query = UsageQuery(
                    START_S, START_S + 100_000, group_by, tenant=tenant, by_tenant=by_tenant
                )
                expected = defaultdict(list)
                for each in rows:
                    asked = tenant in (None, each.tenant) and each.finished_s < query.end_s
                    if asked:
                        owner = each.tenant if by_tenant else tenant
                        expected[owner or "", name_of(each)].append(each)
                [found] = await here.ledger.usage(query)
                names = sorted(expected, key=lambda name: (name[0], str(name[1])))
                assert found == [
                    by_hand(expected[name], name[0] or None, name[1]) for name in names
                ]


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_at_all(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with opened(place(kind, tmp_path, request)) as here:
        query = UsageQuery(0.0, 1.0)
        assert await here.ledger.usage(query, replace(query, group_by=GroupBy.DAY)) == [[], []]


async def test_few_groups_only(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "MOST_GROUPS", 3)
    async with opened(place("sqlite", tmp_path, request)) as here:
        for hour in range(4):
            here.ledger.note(row(finished_s=hour * 3600.0))
        [found] = await here.ledger.usage(UsageQuery(0.0, 3 * 3600.0, GroupBy.HOUR))
        assert [each.group for each in found] == [0, 3600, 7200]
        with pytest.raises(TooManyGroups):
            await here.ledger.usage(UsageQuery(0.0, 4 * 3600.0, GroupBy.HOUR))
