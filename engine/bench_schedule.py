"""What deciding about a step costs: microseconds of `Scheduler.schedule` and of committing it.

    python -m engine.bench_schedule --running 16 --waiting 200 --flows 1,8 --steps 2000

Nothing is computed: pages are bookkeeping only. `full` has every slot taken by a stream to the end,
`turnover` streams that end all the time, so that others are let in. With `--tpot` every stream has
a target that bounds the step's prefill.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cache.block_pool import BlockPool
from cache.sightings import Sightings
from cache.tiered_cache import TieredCache
from cache.tiers import Tiers
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from policies.cost import CostModel

_BLOCK_TOKENS = 16
_PROMPT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Figures:
    """Microseconds of one step's decisions."""

    p50_us: float
    p99_us: float


class _Bench:
    """A scheduler whose sequences are replaced as they end."""

    def __init__(self, args: argparse.Namespace, flows: int, answer_tokens: int) -> None:
        blocks = 4 * args.running * (_PROMPT_TOKENS + answer_tokens) // _BLOCK_TOKENS
        cost = CostModel(token_flops=2e8, weight_bytes=2e8, kv_token_bytes=64.0, block_bytes=1024)
        tiers = Tiers(
            BlockPool(blocks),
            None,
            None,
            cost=cost,
            sightings=Sightings(),
            block_tokens=_BLOCK_TOKENS,
            block_bytes=1024,
            copy_page=lambda _source, _target: None,
            wake=lambda: None,
        )
        self._scheduler = Scheduler(
            TieredCache(tiers, ahead=1),
            block_tokens=_BLOCK_TOKENS,
            step_tokens=args.step_tokens,
            max_running=args.running,
            prompt_logprob_tokens=128,
        )
        self._tpot_s: float | None = args.tpot
        self._flows = flows
        self._answer_tokens = answer_tokens
        self._random = torch.Generator().manual_seed(1)
        self._added = 0
        for _ in range(args.running + args.waiting * flows):
            self._add()

    def run(self, steps: int) -> Figures:
        """Of that many steps, garbage collections left out."""
        taken_ns: list[int] = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(steps):
                self._step(taken_ns.append)
        finally:
            gc.enable()
        cuts = statistics.quantiles(taken_ns, n=100)
        return Figures(cuts[49] / 1e3, cuts[98] / 1e3)

    def _step(self, took_ns: Callable[[int], None]) -> None:
        began = time.perf_counter_ns()
        chunks = self._scheduler.schedule()
        ends = [chunk.sequence for chunk in chunks if chunk.reaches_end]
        for chunk in chunks:
            self._scheduler.commit(chunk)
        took_ns(time.perf_counter_ns() - began)
        for sequence in ends:
            sequence.append(1)
            if sequence.generated >= sequence.request.params.max_tokens:
                self._scheduler.remove(sequence)
                self._add()

    def _add(self) -> None:
        number = self._added
        self._added += 1
        prompt = torch.randint(0, 30_000, (_PROMPT_TOKENS,), generator=self._random).tolist()
        request = EngineRequest(
            str(number),
            prompt,
            SamplingParams(max_tokens=self._answer_tokens, temperature=0.0),
            chain_root=b"bench-schedule-r",
            flow=b"flow %d" % (number % self._flows),
            weight=1.0 + number % self._flows,
            tpot_s=self._tpot_s,
        )
        self._scheduler.add(Sequence(request, number))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench_schedule")
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--waiting", type=int, default=200, help="by flow")
    parser.add_argument("--flows", default="1,8")
    parser.add_argument("--step-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tpot", type=float, default=None, help="seconds")
    args = parser.parse_args()
    for flows in (int(each) for each in args.flows.split(",")):
        for name, answer_tokens in (("full", args.steps + 100), ("turnover", 24)):
            figures = _Bench(args, flows, answer_tokens).run(args.steps)
            sys.stdout.write(
                f"{flows:3} flows  {name:8}  p50 {figures.p50_us:7.1f} us  "
                f"p99 {figures.p99_us:7.1f} us\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
