"""Worker replicas for tests, around a puppet or a model, with all that they said kept."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.report import StepReport
from engine.request import EngineRequest, FinishReason
from engine.sampling_params import SamplingParams
from gateway.dispatch.member import Condition, Health
from gateway.replica import Replica
from gateway.replicas.engine_facts import EngineFacts
from gateway.replicas.worker.messages import CoreShare
from gateway.replicas.worker.replica import WorkerReplica
from gateway.replicas.worker.supervisor import Patience
from gateway.replicas.worker.work_order import WorkOrder
from gateway.settings import ModelSettings

ROOT = Path(__file__).parents[3]
PUPPET = (sys.executable, "-m", "tests.gateway.replicas.puppet_worker")
QUICK = Patience(hang_s=2.0, stop_s=10.0, first_retry_s=0.05, last_retry_s=0.2)
MODEL = ModelSettings(name="m", path="bundled")
PATIENCE_S = 30.0
"""For what must happen; on a machine that is busy with other things."""


@dataclass
class Stage:
    """What a replica told its owner."""

    facts: list[EngineFacts] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    health: list[Health] = field(default_factory=list)
    progress: list[tuple[str, int, int]] = field(default_factory=list)

    def on_ready(self, name: str, facts: EngineFacts) -> None:
        assert name == "m/0"
        self.facts.append(facts)

    def observe(self, name: str, report: StepReport) -> None:
        assert name == "m/0"
        assert self.facts, "a report before anything was known of the engine"
        self.reports.append(report)

    def on_health(self, name: str, health: Health) -> None:
        assert name == "m/0"
        self.health.append(health)

    def on_progress(self, what: str, done: int, total: int) -> None:
        self.progress.append((what, done, total))

    @property
    def conditions(self) -> list[Condition]:
        return [health.condition for health in self.health]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until it holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - what another process does sets no event here
                await asyncio.sleep(0.005)

    async def until_lives(self, count: int) -> None:
        """Until so many lives have begun to serve."""
        await self.until(lambda: self.conditions.count(Condition.SERVING) >= count)


def puppet_order(**variables: str) -> WorkOrder:
    """A puppet with these variables in its environment, beside a secret of the gateway's."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "FOREBAY_SECRET": "very-secret", "FOREBAY_NATIVE": "off"}
    environ = {**os.environ, **own, **variables}
    return WorkOrder(MODEL, CoreShare((), 1), environ, program=PUPPET)


def make_replica(
    stage: Stage, order: WorkOrder, *, max_open: int = 200, patience: Patience = QUICK
) -> WorkerReplica:
    return WorkerReplica(
        "m/0",
        order,
        max_open=max_open,
        on_ready=stage.on_ready,
        observe=stage.observe,
        on_health=stage.on_health,
        patience=patience,
    )


@asynccontextmanager
async def running(
    stage: Stage, order: WorkOrder | None = None, *, max_open: int = 200, **patience: float
) -> AsyncIterator[WorkerReplica]:
    """A replica that serves, and is closed at the end."""
    order = puppet_order() if order is None else order
    replica = make_replica(stage, order, max_open=max_open, patience=replace(QUICK, **patience))
    await replica.start(stage.on_progress)
    try:
        yield replica
    finally:
        await replica.close()


def request(name: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> EngineRequest:
    """A greedy request that shares nothing."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, prompt, params, None, **fields)  # type: ignore[arg-type] # any field


async def answer(replica: Replica, each: EngineRequest) -> tuple[list[int], FinishReason | None]:
    """All tokens of one request, and why it ended."""
    tokens: list[int] = []
    reason = None
    async with replica.submit(each) as stream:
        async for output in stream:
            tokens += output.token_ids
            reason = output.finish_reason
    return tokens, reason


def is_gone(pid: int) -> bool:
    """Whether a process has ended, buried or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def started_with(pid: int) -> tuple[bytes, bytes]:
    """A process's arguments and its environment, as others see them."""
    return Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/environ").read_bytes()


def child_pids(pid: int | None = None) -> list[int]:
    """The workers that a process (this one) has started and that have not been buried; other tests
    may have servers of theirs running."""
    own = os.getpid() if pid is None else pid
    tasks = Path(f"/proc/{own}/task")
    children = [
        int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()
    ]
    return [child for child in children if _is_worker(Path(f"/proc/{child}"))]


def _is_worker(process: Path) -> bool:
    """By its arguments; one that has ended has only its name left, the interpreter's."""
    try:
        arguments = (process / "cmdline").read_bytes()
        name = (process / "comm").read_text()
    except OSError:
        return False
    if arguments:
        return b"puppet_worker" in arguments or b"gateway.replicas.worker" in arguments
    return name.startswith("python")
