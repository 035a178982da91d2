"""Running a load against a server: in a closed or an open loop, with a watch on both ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from loadtest.bench.campaign import CampaignError
from loadtest.live.descriptors import raise_descriptor_limit
from loadtest.live.garbage import without_collections
from loadtest.live.health import LagProbe, Strain, health_of
from loadtest.live.pool import Pool
from loadtest.live.progress import OnProgress, Tally, reported
from loadtest.live.sender import AHEAD_S, OnAnswer, Sender, until
from loadtest.live.watch import Watch, watched
from loadtest.live.wording import Wording
from loadtest.plan import Load, Session
from loadtest.record import ClientHealth, Record, Sample
from loadtest.target import Target

_WARM_UP_CLIENTS = 8


class WarmUpError(CampaignError):
    """No warm-up request was answered whole: what is measured would not be either."""


@dataclass(frozen=True, slots=True)
class LiveOutcome:
    """What a load brought. Records are in the order of their indices, which count the turns of the
    load's sessions through. `began_at` is an ISO 8601 time, that of the records' 0; `wall_s` goes
    from the first sending to the last end. `notes` are lines that a reader of the figures has to
    know. A run that was `interrupted` has the records of what had ended by then.
    """

    records: tuple[Record, ...]
    timeline: tuple[Sample, ...]
    client: ClientHealth
    began_at: str
    wall_s: float
    notes: tuple[str, ...] = ()
    interrupted: bool = False


async def run_load(
    target: Target,
    load: Load,
    *,
    keys: Mapping[str, str] | None = None,
    warm_up: Sequence[Session] = (),
    watch: Watch | None = None,
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
    check_repeats: bool = False,
    on_answer: OnAnswer | None = None,
) -> LiveOutcome:
    """Send all of a load and wait for the ends. A request that fails is a record as any other.

    `keys` are those of the tenants that do not use the target's own. The sessions of `warm_up` are
    sent before, by so many clients as the load has (eight in an open loop), and in no record. With
    `watch` there is a timeline, if the server shows its metrics. Once `stop` is set, open requests
    are cut off and the others not sent. With `check_repeats`, equal greedy requests have to get
    equal texts, or the later answer is wrong. A request has the target's `timeout_s`.

    Raises WarmUpError, with the first reason, if all of the warm-up fails.

    Meant for a process that does nothing else meanwhile, on uvloop: garbage collection is off.
    """
    raise_descriptor_limit()
    stop = stop or asyncio.Event()
    wording = Wording(target, keys or {})
    with Pool(target.endpoint) as pool, without_collections():
        notes: list[str] = []
        if warm_up:
            first = Sender(wording, pool, target.timeout_s)
            clients = load.concurrency or _WARM_UP_CLIENTS
            whole = await _unless(stop, _closed_loop(first, warm_up, clients))
            notes += _warm_up_notes(first.records)
            if whole and notes and not any(record.ok for record in first.records):
                raise WarmUpError(*notes)
        if load.concurrency is not None:
            count = min(load.concurrency, len(load.sessions))
            await _unless(stop, pool.open(count, target.timeout_s))
        sender = Sender(
            *(wording, pool, target.timeout_s), check_repeats=check_repeats, on_answer=on_answer
        )
        return await _measured(sender, load, notes, watch, on_progress, stop)


async def _measured(
    sender: Sender,
    load: Load,
    notes: list[str],
    watch: Watch | None,
    on_progress: OnProgress | None,
    stop: asyncio.Event,
) -> LiveOutcome:
    planned = load.requests
    async with AsyncExitStack() as scope:
        pages = await scope.enter_async_context(watched(watch))
        probe = scope.enter_context(LagProbe())
        # The first requests of an open loop are made ready ahead of their time as well.
        sender.began_s = time.perf_counter() + (AHEAD_S if load.concurrency is None else 0.0)
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        clock_s, cpu_s = time.perf_counter(), time.process_time()
        scope.enter_context(
            reported(on_progress, lambda: sender.tally.progress(planned, sender.began_s))
        )
        whole = await _unless(stop, _all_sent(sender, load))
        cpu_share = (time.process_time() - cpu_s) / (time.perf_counter() - clock_s)
    lags, tally, began_s = probe.lags(), sender.tally, sender.began_s
    records = tuple(
        replace(
            record,
            stall_s=lags.longest_within(began_s + record.sent_s, began_s + record.ended_s),
        )
        for record in sorted(sender.records, key=lambda record: record.index)
    )
    late_s = [max(0.0, record.sent_s - record.due_s) for record in records]
    return LiveOutcome(
        records=records,
        timeline=pages.timeline(began_s),
        client=health_of(Strain(lags, late_s, cpu_share, tally.most_open, tally.refused_sockets)),
        began_at=began_at,
        wall_s=max(record.ended_s for record in records) - min(record.sent_s for record in records)
        if records
        else 0.0,
        notes=(*notes, *_notes(tally, planned, whole=whole)),
        interrupted=not whole,
    )


async def _all_sent(sender: Sender, load: Load) -> None:
    if load.concurrency is None:
        await _open_loop(sender, load.sessions)
    else:
        await _closed_loop(sender, load.sessions, load.concurrency)


async def _closed_loop(sender: Sender, sessions: Sequence[Session], clients: int) -> None:
    """So many clients, each taking the next session when its last has ended."""
    numbered = _numbered(sessions)

    async def client(numbered: Iterator[tuple[int, Session]]) -> None:
        free_s = time.perf_counter()
        for index, session in numbered:
            free_s = await sender.converse(session, index, free_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(sessions))):
            group.create_task(client(numbered))
            # They begin one by one, so that the first answers need not wait for the last request.
            await asyncio.sleep(0)


async def _open_loop(sender: Sender, sessions: Sequence[Session]) -> None:
    """Every session when its time has come, however many are unanswered."""
    by_start = sorted(
        (session.start_s, index, place)
        for place, (index, session) in enumerate(_numbered(sessions))
    )
    async with asyncio.TaskGroup() as group:
        for start_s, index, place in by_start:
            due_s = sender.began_s + start_s
            await until(due_s - AHEAD_S)
            group.create_task(sender.converse(sessions[place], index, due_s))


def _numbered(sessions: Sequence[Session]) -> Iterator[tuple[int, Session]]:
    """Each session with the index of its first turn."""
    index = 0
    for session in sessions:
        yield index, session
        index += len(session.turns)


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Whether the work was done before it was to stop. Then or when this is cancelled, it is."""
    if stop.is_set():
        work.close()
        return False
    working = asyncio.ensure_future(work)
    tasks = (working, asyncio.ensure_future(stop.wait()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _warm_up_notes(records: Sequence[Record]) -> Iterator[str]:
    failed = [record for record in records if not record.ok]
    if failed:
        yield (
            f"{len(failed)} of {len(records)} warm-up requests failed, the first with: "
            f"{failed[0].reason}"
        )


def _notes(tally: Tally, planned: int, *, whole: bool) -> Iterator[str]:
    if not whole:
        never = planned - tally.ended - tally.cut
        yield (
            f"interrupted: {tally.cut} requests were open and are in no figure, {never} of "
            f"{planned} were never sent"
        )
    elif tally.unsent:
        yield (
            f"{tally.unsent} of {planned} requests were not sent, because an earlier turn of their "
            "session had failed"
        )
    if tally.vague:
        yield f"answers of 429 or 503 without Retry-After: {tally.vague}"
