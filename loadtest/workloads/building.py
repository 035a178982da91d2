"""From a workload to a load: how many of its sessions, when, and for whom."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile

from loadtest.plan import SOLE_TENANT, Load, Session, TenantPlan
from loadtest.vocabulary import DEFAULT_VOCABULARY, Vocabulary
from loadtest.workloads.arrivals import Arrivals, Closed, Open, with_arrivals
from loadtest.workloads.base import Workload

_SOLE = TenantPlan()


def build_load(
    workload: Workload,
    *,
    arrivals: Arrivals | None = None,
    requests: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    vocabulary: Vocabulary = DEFAULT_VOCABULARY,
    tenant: TenantPlan = _SOLE,
) -> Load:
    """The workload's sessions until they have `requests` requests, or begin after `seconds`. A
    session is not cut, so that there may be a few more.

    `arrivals` None, and neither of the limits: as usual for the workload. The same for the same
    arguments. All of it is `tenant`'s; tenants whom a recording names keep their names, and have
    all else of `tenant`.

    Raises ValueError for limits that are not positive, and for seconds in a closed loop, which has
    no times; and what the workload raises.
    """
    arrivals = arrivals or workload.usual_arrivals
    sessions = tuple(
        chosen_sessions(
            workload, arrivals, requests=requests, seconds=seconds, seed=seed, vocabulary=vocabulary
        )
    )
    names = dict.fromkeys(session.tenant for session in sessions)
    if names.keys() <= {SOLE_TENANT}:
        tenants: tuple[TenantPlan, ...] = (tenant,)
        if tenant.name != SOLE_TENANT:
            sessions = tuple(replace(session, tenant=tenant.name) for session in sessions)
    else:
        tenants = tuple(replace(tenant, name=name) for name in names)
    return Load(
        title=f"{workload.title()}; {arrivals or 'at recorded times'}; seed {seed}",
        sessions=sessions,
        tenants=tenants,
        concurrency=arrivals.concurrency if isinstance(arrivals, Closed) else None,
    )


def chosen_sessions(
    workload: Workload,
    arrivals: Arrivals | None,
    *,
    requests: int | None,
    seconds: float | None,
    seed: int,
    vocabulary: Vocabulary,
) -> Iterator[Session]:
    """The sessions that `build_load` takes, each at its time; `arrivals` None: as recorded."""
    for name, limit in (("requests", requests), ("seconds", seconds)):
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise ValueError(f"{name}: must be more than 0, and not without end")
    if isinstance(arrivals, Closed) and seconds is not None:
        raise ValueError("seconds: a closed loop ends after so many requests")
    if requests is None and seconds is None:
        requests = workload.usual_requests
    sessions: Iterable[Session] = workload.sessions(seed, vocabulary)
    if isinstance(arrivals, Open):
        sessions = with_arrivals(sessions, arrivals, seed)
    if seconds is not None:
        until_s = seconds
        sessions = takewhile(lambda session: session.start_s < until_s, sessions)
    return limited(sessions, requests)


def limited(sessions: Iterable[Session], requests: int | None) -> Iterator[Session]:
    """The sessions until they have so many requests; None: all."""
    sent = 0
    for session in sessions:
        if requests is not None and sent >= requests:
            return
        sent += len(session.turns)
        yield session
