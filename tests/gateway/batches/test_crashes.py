"""Whatever breaks when: every line ends in exactly one place, and the counts add up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.batches.batch_store import CannotCancel
from gateway.batches.line_answer import LineAnswer
from gateway.batches.line_store import LEASE_S
from gateway.database.opening import Database, DatabaseUnavailable, Transactions
from tests.gateway.batches.stage import BatchStage, FakeLines, FakeTime, answered, lines

ENDED = ("completed", "failed", "expired", "cancelled")
Break = Literal["before", "after", "killed"]


@dataclass
class Brittle:
    """A gateway's way to the database, which breaks at some of its transactions: before it, behind
    it (it is committed, and nobody hears of it), or for good."""

    database: Transactions
    breaks: dict[int, Break]
    killed: bool = False
    count: int = field(default=0)

    def begin(self, *, durable: bool = False) -> Any:
        return self._through(self.database.begin(durable=durable))

    def read(self) -> Any:
        return self._through(self.database.read())

    @asynccontextmanager
    async def _through(self, transaction: Any) -> AsyncIterator[Any]:
        self.count += 1
        how = self.breaks.get(self.count)
        if how == "killed":
            self.killed = True
        if self.killed or how == "before":
            raise DatabaseUnavailable("before")
        async with transaction as connection:
            yield connection
        if how == "after":
            raise DatabaseUnavailable("after")


ANSWERS = {
    "well": answered("well"),
    "wrong": answered("wrong", 400),
    "busy": answered("busy", 503),
    "lost": ConnectionResetError(),
}


class Scripted:
    """Each line's answers in turn; the last one for ever."""

    def __init__(self, script: list[list[str]]) -> None:
        self._script = [list(answers) for answers in script]

    async def __call__(self, name: str) -> LineAnswer:
        await asyncio.sleep(0)
        answers = self._script[int(name.removeprefix("line-"))]
        answer = ANSWERS[answers.pop(0) if len(answers) > 1 else answers[0]]
        if isinstance(answer, Exception):
            raise answer
        return answer


scripts = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["busy", "lost"]), max_size=2), st.sampled_from(["well", "wrong"])
    ).map(lambda both: [*both[0], both[1]]),
    min_size=1,
    max_size=5,
)
breaks = st.dictionaries(
    st.integers(1, 60), st.sampled_from(["before", "after", "killed"]), max_size=5
)
ends = st.sampled_from([None, None, "cancel", "expire"])


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    script=scripts,
    broken=st.lists(breaks, min_size=2, max_size=4),
    end=ends,
    at=st.integers(0, 30),
)
async def test_every_line_ends_once(
    sqlite: Database,
    script: list[list[str]],
    broken: list[dict[int, Break]],
    end: str | None,
    at: int,
):
    await run(sqlite, script, broken, end, at)


async def test_every_line_ends_once_on_both(database: Database):
    """Some ways that have been wrong, or might be."""
    busy = [["busy", "well"], ["wrong"], ["lost", "well"]]
    await run(database, busy, [{}, {}], None, 0)
    await run(database, busy, [{9: "after", 12: "after", 20: "killed"}, {11: "after"}], None, 0)
    await run(database, busy, [{5: "killed"}, {8: "killed"}, {20: "killed"}], "cancel", 5)
    await run(
        database, busy, [dict.fromkeys(range(5, 60, 3), "after"), {30: "killed"}], "expire", 9
    )


async def run(
    database: Database,
    script: list[list[str]],
    broken: list[dict[int, Break]],
    end: str | None,
    at: int,
) -> None:
    """Two gateways at a time, the next ones in place of those that were killed; at some moment the
    batch is cancelled or its window closes."""
    clock = FakeTime()
    stage = BatchStage(database, batch={"concurrency": 2}, clock=clock)
    runner = FakeLines(Scripted(script))
    waiting = [Brittle(database, each) for each in broken]
    async with stage.gateway() as api:  # takes requests, runs nothing
        await api.runner.drain(1)
        batch_id = await stage.begin(lines(len(script)))
        async with Gateways(stage, runner, waiting, database) as gateways, asyncio.timeout(20):
            moments = 0
            while (batch := await stage_batch(api, stage, batch_id))["status"] not in ENDED:
                if moments == at and end == "cancel":
                    await cancel(api, batch_id)
                elif moments == at and end == "expire":
                    clock.now_s += 86_400
                moments += 1
                clock.now_s += LEASE_S / 8
                await gateways.replace_killed()
                await asyncio.sleep(0.005)
        stage.late.use(api)
        output, errors = await stage.results(batch)
    if batch["status"] == "completed" or batch["request_counts"]["total"]:
        assert set(output) | set(errors) == {f"line-{n}" for n in range(len(script))}
    if batch["status"] == "completed":
        well = {f"line-{n}" for n, answers in enumerate(script) if answers[-1] == "well"}
        assert set(output) == well
    assert end is not None or batch["status"] == "completed"


class Gateways:
    """Two that live; the last ones break no more."""

    def __init__(
        self, stage: BatchStage, runner: FakeLines, waiting: list[Brittle], database: Database
    ) -> None:
        self._stage = stage
        self._runner = runner
        self._waiting = waiting
        self._database = database
        self._living: list[tuple[Brittle, AsyncExitStack]] = []

    async def __aenter__(self) -> Gateways:
        await self.replace_killed()
        return self

    async def __aexit__(self, *_: object) -> None:
        for _, scope in self._living:
            await scope.aclose()

    async def replace_killed(self) -> None:
        for each in [each for each in self._living if each[0].killed]:
            self._living.remove(each)
            await each[1].aclose()
        while len(self._living) < 2:
            database = self._waiting.pop(0) if self._waiting else Brittle(self._database, {})
            scope = AsyncExitStack()
            await scope.enter_async_context(self._stage.gateway(self._runner, database))
            self._living.append((database, scope))


async def stage_batch(api: Any, stage: BatchStage, batch_id: str) -> Any:
    stage.late.use(api)
    return await stage.batch_of(batch_id)


async def cancel(api: Any, batch_id: str) -> None:
    with suppress(CannotCancel):
        await api.batches.cancel("acme", batch_id)
