"""Sums over the ledger: what was used, what it cost, and how promises were kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Row, Select, case, cast, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.database.schema import requests
from gateway.ledger.group_by import GroupBy

MOST_GROUPS = 5000
PERCENTILES = (50, 90, 95, 99)

_BUCKET = "bucket"


class TooManyGroups(Exception):
    """There are more than `MOST_GROUPS`."""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Rows of requests that were over from `start_s` on and before `end_s` (Unix times), of one
    tenant or of all. `by_tenant` keeps tenants apart."""

    start_s: float
    end_s: float
    group_by: GroupBy | None = None
    tenant: str | None = None
    by_tenant: bool = False


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Exact: of n values in order, the value at rank ⌈n · p / 100⌉. Seconds, by each of
    `PERCENTILES`; empty where there are no values."""

    values: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Usage:
    """One group's sums. `tenant` and `group` say which, None where it is all of them; a bucket of
    time is named by the Unix time that it begins at.

    `promised` counts requests that were promised something, `met` those of them that got it.
    Storage of named prefixes is in `cost_nusd`, and by itself in `storage_nusd`.
    """

    tenant: str | None
    group: str | int | None
    requests: Mapping[str, int]
    prompt_tokens: int
    cached_device_tokens: int
    cached_dram_tokens: int
    cached_redis_tokens: int
    written_tokens: int
    output_tokens: int
    token_hours: float
    cost_nusd: int
    storage_nusd: int
    promised: int
    met: int
    ttft: Percentiles
    tpot: Percentiles
    publish: Percentiles


async def read_usage(connection: AsyncConnection, query: UsageQuery) -> list[Usage]:
    """Every group that has rows, by tenant and group. Memory goes with the number of groups, not of
    rows. Raises TooManyGroups."""
    groups = _groups(connection, query)
    sums = (await connection.execute(_sums(query, groups))).all()
    if len(sums) > MOST_GROUPS:
        raise TooManyGroups
    outcomes: dict[tuple[Any, ...], dict[str, int]] = {}
    for row in await connection.execute(_outcomes(query, groups)):
        *name, outcome, count = row
        outcomes.setdefault(tuple(name), {})[outcome] = count
    latencies = [
        _by_group(await connection.execute(_ranked(query, groups, column)))
        for column in (requests.c.ttft_s, requests.c.tpot_s, requests.c.publish_s)
    ]
    return [_usage(query, row, len(groups), outcomes, latencies) for row in sums]


def _groups(connection: AsyncConnection, query: UsageQuery) -> list[ColumnElement[Any]]:
    groups: list[ColumnElement[Any]] = [requests.c.tenant] if query.by_tenant else []
    if query.group_by is None:
        return groups
    if (bucket_s := query.group_by.bucket_s) is None:
        return [*groups, requests.c[query.group_by.value]]
    number: ColumnElement[Any] = requests.c.finished_s / bucket_s
    if connection.dialect.name == "postgresql":
        number = func.floor(number)  # its casts round, SQLite's cut off
    return [*groups, (cast(number, BigInteger) * bucket_s).label(_BUCKET)]


def _chosen(query: UsageQuery, *columns: ColumnElement[Any]) -> Select[Any]:
    chosen = select(*columns).where(
        requests.c.finished_s >= query.start_s, requests.c.finished_s < query.end_s
    )
    return chosen if query.tenant is None else chosen.where(requests.c.tenant == query.tenant)


def _sums(query: UsageQuery, groups: Sequence[ColumnElement[Any]]) -> Select[Any]:
    is_storage = requests.c.kind == "storage"
    columns = (
        func.sum(requests.c.prompt_tokens),
        func.sum(requests.c.cached_device_tokens),
        func.sum(requests.c.cached_dram_tokens),
        func.sum(requests.c.cached_redis_tokens),
        func.sum(requests.c.written_tokens),
        func.sum(requests.c.output_tokens),
        func.sum(requests.c.token_hours),
        func.sum(requests.c.cost_nusd),
        func.sum(case((is_storage, requests.c.cost_nusd), else_=0)),
        func.count(requests.c.met_slo),
        func.sum(case((requests.c.met_slo.is_(True), 1), else_=0)),
    )
    chosen = _chosen(query, *groups, *columns).having(func.count() > 0)
    return chosen.group_by(*groups).order_by(*groups).limit(MOST_GROUPS + 1)


def _outcomes(query: UsageQuery, groups: Sequence[ColumnElement[Any]]) -> Select[Any]:
    outcome = requests.c.outcome
    chosen = _chosen(query, *groups, outcome, func.count()).where(requests.c.kind == "request")
    return chosen.group_by(*groups, outcome)


def _ranked(
    query: UsageQuery, groups: Sequence[ColumnElement[Any]], column: ColumnElement[Any]
) -> Select[Any]:
    """The values at the percentiles' ranks: the same on both databases, where only one of them has
    a function for it. The database sorts, on its disk where that is long."""
    named = [group.label(f"group_{number}") for number, group in enumerate(groups)]
    inner = (
        _chosen(
            query,
            *named,
            column.label("value"),
            func.row_number().over(partition_by=groups or None, order_by=column).label("place"),
            func.count().over(partition_by=groups or None).label("size"),
        )
        .where(column.is_not(None))
        .subquery()
    )
    at_rank = or_(*(inner.c.place == _rank(inner.c.size, percent) for percent in PERCENTILES))
    names = [inner.c[label.name] for label in named]
    return select(*names, inner.c.value, inner.c.place, inner.c.size).where(at_rank)


def _rank(size: Any, percent: int) -> Any:
    return (size * percent + 99) // 100


def _by_group(rows: Any) -> dict[tuple[Any, ...], Percentiles]:
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        *name, value, place, size = row
        values = found.setdefault(tuple(name), {})
        values.update({p: value for p in PERCENTILES if _rank(size, p) == place})
    return {name: Percentiles(dict(sorted(values.items()))) for name, values in found.items()}


_NO_VALUES = Percentiles({})


def _usage(
    query: UsageQuery,
    row: Row[Any],
    groups: int,
    outcomes: Mapping[tuple[Any, ...], Mapping[str, int]],
    latencies: Sequence[Mapping[tuple[Any, ...], Percentiles]],
) -> Usage:
    name, sums = tuple(row[:groups]), row[groups:]
    # PostgreSQL's sums of whole numbers are Decimals
    (prompt, device, dram, redis, written, output) = (int(each) for each in sums[:6])
    cost, storage, promised, met = (int(each) for each in sums[7:])
    ttft, tpot, publish = (each.get(name, _NO_VALUES) for each in latencies)
    return Usage(
        tenant=name[0] if query.by_tenant else query.tenant,
        group=None if query.group_by is None else name[-1],
        requests=outcomes.get(name, {}),
        prompt_tokens=prompt,
        cached_device_tokens=device,
        cached_dram_tokens=dram,
        cached_redis_tokens=redis,
        written_tokens=written,
        output_tokens=output,
        token_hours=float(sums[6]),
        cost_nusd=cost,
        storage_nusd=storage,
        promised=promised,
        met=met,
        ttft=ttft,
        tpot=tpot,
        publish=publish,
    )
