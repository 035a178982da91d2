"""A trace through a fleet that is not there."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from loadtest.columns import ColumnRecords
from loadtest.plan import TenantPlan
from loadtest.record import Run
from loadtest.simulate.clock import Clock
from loadtest.simulate.desk import Choice, FrontDesk
from loadtest.simulate.directory import BlockDirectory
from loadtest.simulate.gate import Gate
from loadtest.simulate.hardware import with_block_tokens
from loadtest.simulate.ideal import IdealCache
from loadtest.simulate.job import SimJob
from loadtest.simulate.outcomes import TOO_LONG, Outcomes
from loadtest.simulate.pool import BlockPool
from loadtest.simulate.redis_tier import RedisTier
from loadtest.simulate.replica import Replica
from loadtest.simulate.result import SimResult, Work
from loadtest.simulate.spec import SimSpec
from loadtest.simulate.tiers import ReplicaTiers
from loadtest.simulate.timeline import Timeline
from loadtest.trace import Trace, TraceRequest
from policies.admission import Ruling, Verdict
from policies.cost import CostModel
from policies.slo import Slo

Tell = Callable[[str], None]
_TELL_EVERY = 20_000
_ENDLESS_BLOCKS = 1 << 60


def simulate(trace: Trace, spec: SimSpec, *, tell: Tell = lambda _: None) -> SimResult:
    """Send the trace's requests when they came, and see what becomes of each.

    The same trace and spec give the same result. `tell` hears how far it is. Raises ValueError for
    requests that are not in the order of their times, of a tenant that the trace does not name, or
    without a prompt or with too many blocks for it, and for a device that holds no two blocks.
    """
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    began_s = time.perf_counter()
    with _no_collector():
        simulation = Simulation(trace, spec, tell)
        simulation.run()
    return simulation.result(began_at, time.perf_counter() - began_s)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Nothing here makes cycles that it would have to free, and it would look through millions of
    blocks again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Simulation:
    """One run, as `simulate` makes it. It is the replicas' watcher."""

    def __init__(self, trace: Trace, spec: SimSpec, tell: Tell) -> None:
        size = trace.block_tokens
        if spec.device_tokens < 2 * size:
            raise ValueError(
                f"a device of {spec.device_tokens} tokens does not hold two blocks of {size}"
            )
        self._clock = Clock()
        self._trace = trace
        self._spec = spec
        self._tell = tell
        self._tenants = [_with_slo(tenant, spec.slo) for tenant in trace.tenants]
        self._tenant_numbers = {each.name: at for at, each in enumerate(self._tenants)}
        names = tuple(self._tenant_numbers)
        self._outcomes = Outcomes(len(trace.requests), names, spec.replicas)
        self._longest_tokens = (spec.device_tokens // size - 2) * size
        redis = RedisTier(spec.redis_tokens // size) if spec.redis_tokens >= size else None
        self._redis = redis
        self._directory = None
        if spec.prompt_cache:
            self._directory = BlockDirectory(
                self._clock,
                spec.entry_replicas,
                size,
                redis=redis,
                delay_s=spec.directory_delay_s,
            )
        self._shared_device = BlockPool(_ENDLESS_BLOCKS) if spec.oracle else None
        if self._shared_device is not None and self._directory is not None:
            self._directory.everybody_has(self._shared_device)
        cost = CostModel.given(with_block_tokens(spec.cost, size))
        self._replicas = [self._make_replica(index, cost) for index in range(spec.replicas)]
        entry = self._replicas[: spec.entry_replicas]
        detailed = spec.fair and len(self._tenants) > 1
        self._desk = FrontDesk(
            spec,
            spec.policy,
            self._clock,
            entry,
            self._directory,
            detailed=detailed,
            seed=f"desk/{spec.seed}",
        )
        self._second_desk: FrontDesk | None = None
        if spec.split is not None:
            # an answer goes where the fewest are: there is nothing to be found for it anywhere
            self._second_desk = FrontDesk(
                spec,
                "least-loaded",
                self._clock,
                self._replicas[spec.entry_replicas :],
                None,
                detailed=detailed,
                seed=f"second desk/{spec.seed}",
            )
        self._gate: Gate | None = None
        if spec.admission:
            self._gate = Gate(
                self._desk,
                self._clock,
                [tenant.slo for tenant in self._tenants],
                spec.max_queue_s,
                self._admit,
                self._refuse,
            )

        self._ideal = IdealCache()
        self._timeline = Timeline(trace.requests, self._outcomes, self._here)

    def run(self) -> None:
        """Until every request has ended."""
        clock = self._clock
        latest_s = 0.0
        total = len(self._trace.requests)
        for index, request in enumerate(self._trace.requests):
            if request.at_s < latest_s:
                raise ValueError(f"request {index} came before the one before it")
            latest_s = request.at_s
            while clock.next_s <= latest_s:
                clock.step()
            clock.now_s = latest_s
            self._timeline.pass_by(latest_s)
            self._arrive(index, request)
            if index and index % _TELL_EVERY == 0:
                self._tell(f"{index:,} of {total:,} requests, {latest_s:,.0f} s")
        while clock.next_s < float("inf"):
            clock.step()

    def result(self, began_at: str, wall_s: float) -> SimResult:
        """What became of everybody, in a run that began then and took so long."""
        trace, spec, outcomes = self._trace, self._spec, self._outcomes
        columns = outcomes.columns()
        first_s = float(columns.sent_s[0]) if len(columns) else 0.0
        simulated_s = float(columns.ended_s.max()) - first_s if len(columns) else 0.0
        replicas = self._replicas
        run = Run(
            name=spec.policy,
            kind="simulated",
            target=_in_words(spec),
            workload=trace.name,
            command="",
            began_at=began_at,
            wall_s=simulated_s,
            records=ColumnRecords(columns),
            tenants=tuple(self._tenants),
            settings=_settings(spec),
            timeline=tuple(self._timeline.samples),
        )
        work = Work(
            busy_s=tuple(each.busy_s for each in replicas),
            line_s=sum(each.line_s for each in replicas),
            steps=sum(each.steps for each in replicas),
            preemptions=sum(each.preemptions for each in replicas),
            loads=sum(each.tiers.loads for each in replicas),
            device_evictions=sum(each.pool.evictions for each in replicas),
            dram_evictions=sum(
                each.tiers.dram.evictions for each in replicas if each.tiers.dram is not None
            ),
            redis_evictions=0 if self._redis is None else self._redis.evictions,
            blocks=outcomes.blocks,
            blocks_found=outcomes.blocks_found,
            queued=0 if self._gate is None else self._gate.rulings[Verdict.QUEUE],
            downgraded=0 if self._gate is None else self._gate.rulings[Verdict.DOWNGRADE],
        )
        ideal = self._ideal.hit_rate
        return SimResult(run, spec, work, ideal, simulated_s, wall_s)

    def check_idle(self) -> None:
        """Raise AssertionError unless every replica has ended with nothing left over, and its books
        agree."""
        for replica in self._replicas:
            replica.check_idle()

    def began(self, job: SimJob) -> None:
        """See `replica.Watcher.began`."""
        self._desk.began(job)

    def ended(self, job: SimJob) -> None:
        """See `replica.Watcher.ended`."""
        desk = self._desk
        tokens = job.answer_tokens
        if self._second_desk is not None and job.replica >= self._spec.entry_replicas:
            desk = self._second_desk
            tokens -= 1
        desk.ended(job, tokens)
        self._outcomes.done(job, self._clock.now_s)

    def moves(self, job: SimJob) -> bool:
        """See `replica.Watcher.moves`."""
        split = self._spec.split
        if split is None:
            return False
        self._desk.ended(job, 1)
        moved_s = split.latency_s + split.token_s * job.prompt_tokens
        self._clock.at(self._clock.now_s + moved_s, lambda _: self._generate(job))
        return True

    def _here(self) -> tuple[int, int]:
        """How many sequences run, and how many wait."""
        counts = [replica.sequences for replica in self._replicas]
        at_gate = 0 if self._gate is None else self._gate.waiting
        return sum(running for running, _ in counts), at_gate + sum(each for _, each in counts)

    def _arrive(self, index: int, request: TraceRequest) -> None:
        number = self._tenant_numbers.get(request.tenant)
        if number is None:
            raise ValueError(
                f"request {index} is of {request.tenant}, whom the trace does not name"
            )
        if request.prompt_tokens < 1:
            raise ValueError(f"request {index} has no prompt")
        if (len(request.blocks) - 1) * self._trace.block_tokens >= request.prompt_tokens:
            raise ValueError(f"request {index} has more blocks than its prompt fills")
        tenant = self._tenants[number]
        fair = self._spec.fair
        job = SimJob(
            index,
            request,
            number,
            priority=tenant.service_class.priority if fair else 0,
            flow=tenant.name.encode() if fair else b"",
            weight=tenant.weight if fair else 1.0,
            ttft_s=tenant.slo.ttft_s,
            tpot_s=tenant.slo.tpot_s,
            reads_cache=self._spec.prompt_cache,
            by_deadline=fair,
        )
        if job.prompt_tokens + job.answer_tokens > self._longest_tokens:
            self._outcomes.refused(job, TOO_LONG, self._clock.now_s)
        elif self._gate is not None:
            self._gate.arrive(job)
        else:
            self._ideal.ask(request.blocks)
            self._desk.place(job, self._desk.choose(job)).submit(job)

    def _admit(self, job: SimJob, choice: Choice) -> None:
        """The gate lets it in."""
        self._ideal.ask(self._trace.requests[job.index].blocks)
        job.placed_s = self._clock.now_s
        job.predicted_s = choice.prediction.ttft_s
        self._desk.place(job, choice).submit(job)

    def _refuse(self, job: SimJob, ruling: Ruling) -> None:
        downgraded = ruling.verdict is Verdict.DOWNGRADE
        reason = "downgrade" if downgraded else ruling.reason
        self._outcomes.refused(job, reason, self._clock.now_s)

    def _generate(self, job: SimJob) -> None:
        """A prompt's KV has arrived where its answer is generated."""
        desk = self._second_desk
        assert desk is not None
        job.shipped = True
        job.begun = False
        job.tag = None
        job.rest = None
        replica = desk.place(job, desk.choose(job))
        desk.began(job)
        replica.submit(job)

    def _make_replica(self, index: int, cost: CostModel) -> Replica:
        spec, size = self._spec, self._trace.block_tokens
        routed_to = index < spec.entry_replicas and self._shared_device is None
        tiers = ReplicaTiers(
            self._clock,
            cost,
            size,
            device_blocks=spec.device_tokens // size,
            dram_blocks=spec.dram_tokens // size,
            redis=self._redis,
            directory=self._directory if routed_to else None,
            bit=1 << index,
            device=self._shared_device,
        )
        return Replica(index, spec, size, tiers, self._clock, self)


def _with_slo(tenant: TenantPlan, slo: Slo | None) -> TenantPlan:
    if slo is None:
        return tenant
    return TenantPlan(tenant.name, tenant.key_env, slo, tenant.service_class, tenant.weight)


def _in_words(spec: SimSpec) -> str:
    fleet = f"{spec.replicas} replicas"
    if spec.split is not None:
        fleet = f"{spec.split.prefill} replicas for prompts, {spec.split.decode} for answers"
    return f"{fleet}, {spec.policy}" + (", one endless cache for all" if spec.oracle else "")


def _settings(spec: SimSpec) -> dict[str, str]:
    settings = {
        "policy": spec.policy,
        "replicas": str(spec.replicas),
        "max_running": str(spec.max_running),
        "device_tokens": str(spec.device_tokens),
        "dram_tokens": str(spec.dram_tokens),
        "redis_tokens": str(spec.redis_tokens),
        "prompt_cache": str(spec.prompt_cache),
        "report_delay_s": str(spec.report_delay_s),
        "directory_delay_s": str(spec.directory_delay_s),
        "admission": str(spec.admission),
        "fair": str(spec.fair),
        "shortlist": str(spec.shortlist),
        "max_queue_s": str(spec.max_queue_s),
        "batching": spec.batching.mode.value,
        "oracle": str(spec.oracle),
        "noise": str(spec.noise),
        "seed": str(spec.seed),
    }
    if not spec.batching.continuous:
        window_s = spec.batching.due_s(0.0)
        settings["batching"] += f", {spec.batching.size} within {window_s:g} s"
    return settings | {name: repr(value) for name, value in spec.cost._asdict().items()}
