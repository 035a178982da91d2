"""Continuous batching beside dynamic and static batching: who waits for whom.

The same requests come at the same times to three forebays, which differ in their way of batching
alone: many short answers, and a few that are long. They come whether earlier ones are answered or
not, as one who asks does not know what else runs; and so few of them that two cores with nothing
else to do keep up in every mode. Nothing is cached, and every server has as many places as a batch
has requests.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from loadtest.bench.campaign import CampaignError, Tell, warm_up
from loadtest.bench.tenants_load import Fate, Offer, Shape, send, side_by_side, undisturbed
from loadtest.forebay_server import KEY_VARIABLE, MODEL, running_forebay
from loadtest.stats.distribution import Distribution
from loadtest.target import Target
from policies.batching import BatchingMode

BATCHING = "batching"

_MODES = (BatchingMode.CONTINUOUS, BatchingMode.DYNAMIC, BatchingMode.STATIC)
_LONG = Shape(64, 200)
_MAX_WAITING = 1024
_MAX_QUEUE_S = 600
"""Room and time for everybody: who waits is what is measured."""


@dataclass(frozen=True, slots=True)
class BatchingPlan:
    """`requests` come for `seconds`, at times that are drawn evenly: Poisson arrivals, given their
    number. Of these `long_requests` have the shape `long`; the others have `short_prompt_tokens`
    and an answer of `short_outputs` tokens, from the first to the last of these numbers.

    `size` is that of a batch, and how many run at once. The number of requests is a multiple of
    it, so that no static batch must wait for its window.
    """

    requests: int = 40
    seconds: float = 30.0
    long_requests: int = 6
    long: Shape = _LONG
    short_prompt_tokens: int = 32
    short_outputs: tuple[int, int] = (8, 16)
    size: int = 8

    def __post_init__(self) -> None:
        if self.requests % self.size:
            raise ValueError(f"{self.requests} requests are no whole batches of {self.size}")


@dataclass(frozen=True, slots=True)
class Waits:
    """What requests of one kind waited, milliseconds: for the first token, and for the last."""

    ttft_ms: Distribution
    e2e_ms: Distribution


@dataclass(frozen=True, slots=True)
class ModeFigure:
    """One mode, over all its rounds. `output_tokens_per_s` are those of all answers over the time
    from the first request to the end of the last answer, one figure for each round."""

    mode: BatchingMode
    short: Waits
    long: Waits
    output_tokens_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BatchingFigures:
    """All three modes, the continuous one first."""

    modes: tuple[ModeFigure, ...]
    plan: BatchingPlan


async def measure_batching(
    *, rounds: int, seed: int, tell: Tell, plan: BatchingPlan | None = None
) -> BatchingFigures:
    """Every round has all modes, every other one in reverse. Raises CampaignError."""
    plan = plan or BatchingPlan()
    tell("starting a forebay for each way of batching")
    runs: dict[BatchingMode, list[BatchingRun]] = {mode: [] for mode in _MODES}
    async with _running_modes(plan, seed) as targets:
        for turn in range(rounds):
            work = drawn(plan, f"{seed}/{turn}")
            for mode in _MODES if turn % 2 == 0 else _MODES[::-1]:
                tell(f"batching: {mode}, {turn + 1} of {rounds}")
                runs[mode].append(await run(targets[mode], work, plan, f"{seed}/{turn}"))
    return BatchingFigures(tuple(sum_up(mode, runs[mode]) for mode in _MODES), plan)


def batching_config(mode: BatchingMode, plan: BatchingPlan) -> str:
    """The configuration of a forebay that batches this way."""
    batching = f"mode: {mode}"
    if mode is not BatchingMode.CONTINUOUS:
        batching += f", size: {plan.size}"
    return (
        "models:\n"
        f"  - name: {MODEL}\n"
        "    path: bundled\n"
        f"    max_running: {plan.size}\n"
        f"    max_waiting: {_MAX_WAITING}\n"
        f"    max_queue_s: {_MAX_QUEUE_S}\n"
        f"    batching: {{{batching}}}\n"
        "    cache: {dram: 0, redis: false}\n"
        "redis: {url: 'off'}\n"
        "tenants:\n"
        "  - id: loadtest\n"
        f"    keys: [{{env: {KEY_VARIABLE}}}]\n"
    )


@asynccontextmanager
async def _running_modes(
    plan: BatchingPlan, seed: int
) -> AsyncIterator[Mapping[BatchingMode, Target]]:
    """A server for each mode, warmed up. One that has nothing to do takes no time of the others."""
    async with AsyncExitStack() as running:
        targets: dict[BatchingMode, Target] = {}
        for mode in _MODES:
            config = batching_config(mode, plan)
            server = await running.enter_async_context(running_forebay(config=config))
            targets[mode] = Target(mode, server.endpoint, MODEL)
            await warm_up(targets[mode], seed)
        yield targets


def drawn(plan: BatchingPlan, seed: str) -> dict[Shape, list[float]]:
    """When requests of which shape are sent: seconds from the beginning, in order."""
    draw = random.Random(f"{seed}/batching")
    long = set(draw.sample(range(plan.requests), plan.long_requests))
    work: dict[Shape, list[float]] = {}
    times_s = sorted(draw.uniform(0, plan.seconds) for _ in range(plan.requests))
    for number, at_s in enumerate(times_s):
        shape = plan.long
        if number not in long:
            shape = Shape(plan.short_prompt_tokens, draw.randint(*plan.short_outputs))
        work.setdefault(shape, []).append(at_s)
    return work


@dataclass(frozen=True, slots=True)
class BatchingRun:
    """What became of the requests of one run."""

    short: Sequence[Fate]
    long: Sequence[Fate]


async def run(
    target: Target, work: Mapping[Shape, Sequence[float]], plan: BatchingPlan, seed: str
) -> BatchingRun:
    """Send what was drawn. The prompts are the same for the same seed. Raises CampaignError."""
    with undisturbed():
        async with side_by_side() as sent:
            sending = {
                shape: sent.create_task(
                    send(Offer(target, shape, at_s), f"{seed}/{shape.output_tokens}")
                )
                for shape, at_s in work.items()
            }
    short = [
        fate for shape, task in sending.items() if shape != plan.long for fate in task.result()
    ]
    return BatchingRun(short, sending[plan.long].result())


def sum_up(mode: BatchingMode, runs: Sequence[BatchingRun]) -> ModeFigure:
    """Over all rounds. Raises CampaignError if a request was turned away, which changes what the
    others waited for."""
    return ModeFigure(
        mode,
        _waits(mode, [fate for one in runs for fate in one.short]),
        _waits(mode, [fate for one in runs for fate in one.long]),
        tuple(_tokens_per_s([*one.short, *one.long]) for one in runs),
    )


def _waits(mode: BatchingMode, fates: Sequence[Fate]) -> Waits:
    answers = [fate.answer for fate in fates if fate.answer is not None]
    ttft_ms = Distribution.of(answer.ttft_s * 1e3 for answer in answers)
    e2e_ms = Distribution.of(answer.e2e_s * 1e3 for answer in answers)
    if len(answers) < len(fates) or ttft_ms is None or e2e_ms is None:
        raise CampaignError(f"batching: {mode}: a request was turned away instead of queued")
    return Waits(ttft_ms, e2e_ms)


def _tokens_per_s(fates: Sequence[Fate]) -> float:
    wall_s = max(fate.ended_at_s for fate in fates) - min(fate.sent_at_s for fate in fates)
    return sum(fate.answer.output_tokens for fate in fates if fate.answer is not None) / wall_s
