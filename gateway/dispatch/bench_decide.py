"""How long a whole decision takes, from a prompt's tokens to a receipt.

`python -m gateway.dispatch.bench_decide --json` prints one JSON object. A directory knows as many
blocks as are asked for, in conversations that a fleet of replicas at work holds; then prompts of
one length are hashed and decided on: such as nobody knows, of which all know the beginning, that a
few know in part, and that all know up to ends of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import ParamSpec

from cache.block import Tier
from cache.block_events import BlockEvents, TierChange
from cache.directory import Directory
from cache.hashing import CHAIN_BLOCK_TOKENS, HASH_BYTES
from cache.prompt_links import prompt_links, token_bytes_of
from gateway.dispatch.member import Condition, Health, Member
from gateway.dispatch.prefix import Prefix
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import Router
from policies.bench_routing import LEARNED
from policies.cost import Coefficients
from policies.routing import RouteRequest
from policies.routing_ttft import PredictedTtft

_SEED = 11
_SYSTEM_TOKENS = 1024
_BATCH_LINKS = 256
_CONVERSATION_LINKS = (16, 512)
_VOCABULARY = range(256, 48_000)
_PROMPTS_OF_A_KIND = 8
_HEALTHY = Health(Condition.SERVING)

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of CPU time."""

    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """`hashing` is from a prompt's ids as the tokenizer gives them to its links, the rest decisions
    on prompts whose links are there: directory, standings, policy and receipt."""

    blocks: int
    replicas: int
    prompt_tokens: int
    hashing: Times
    cold: Times
    system_prompt: Times
    warm_on_few: Times
    own_end_each: Times


class _Replica:
    """A replica that only is there. Implements `Routable`."""

    def __init__(self, name: str, cost: Coefficients) -> None:
        self.name = name
        self._cost = cost

    def health(self) -> Health:
        return _HEALTHY

    def coefficients(self) -> Coefficients:
        return self._cost


class _Silent:
    """Nobody wants to know."""

    def decided(self, receipt: Receipt) -> None:
        """See `RouterObserver`."""

    def began(self, receipt: Receipt) -> None:
        """See `RouterObserver`."""

    def routed(self, model: str, replica: str, links: Sequence[bytes]) -> None:
        """See `RouterObserver`."""


class _Fleet:
    """A router over replicas that tell of what they hold."""

    def __init__(self, replicas: int, max_blocks: int, draw: random.Random) -> None:
        self.directory = Directory(max_blocks=max_blocks)
        self.router: Router[_Replica] = Router(
            "model", self.directory, PredictedTtft(), "predicted-ttft", draw, _Silent()
        )
        self.names = [f"model/{number}" for number in range(replicas)]
        self._told = dict.fromkeys(self.names, 0)
        for name in self.names:
            self.directory.join(name)
            cost = LEARNED._replace(token_s=LEARNED.token_s * draw.uniform(0.9, 1.1))
            member = Member(
                _Replica(name, cost),
                "process",
                max_running=16,
                capacity=64,
                block_tokens=CHAIN_BLOCK_TOKENS,
                clock=time.monotonic,
            )
            self.router.add(member, tells_events=True)

    def tell(self, name: str, links: Sequence[bytes]) -> None:
        """A replica has computed these blocks."""
        for start in range(0, len(links), _BATCH_LINKS):
            self._told[name] += 1
            stored = tuple(links[start : start + _BATCH_LINKS])
            change = TierChange(Tier.DEVICE, stored)
            self.directory.apply(name, BlockEvents(1, self._told[name], (change,)))

    @contextmanager
    def at_work(self, draw: random.Random, flows: int) -> Iterator[None]:
        """With a few requests of so many flows on every replica."""
        with ExitStack() as placed:
            for member in self.router.members:
                for number in range(flows + draw.randrange(8) - 1):
                    tokens, flow = draw.randrange(100, 2000), b"%d" % (number % flows)
                    share = placed.enter_context(member.load.share(tokens // 4, tokens, flow=flow))
                    if draw.random() < 0.8:
                        share.begin()
            yield


def measure(
    *, blocks: int, replicas: int, prompt_tokens: int, decisions: int, flows: int = 1
) -> DecisionTimes:
    """All of it; what is asked for is of one of the flows."""
    draw = random.Random(_SEED)
    length = prompt_tokens // CHAIN_BLOCK_TOKENS
    root = draw.randbytes(HASH_BYTES)
    fleet = _Fleet(replicas, 2 * blocks + 64 * length, draw)
    system = draw.choices(_VOCABULARY, k=min(_SYSTEM_TOKENS, prompt_tokens))
    system_links = prompt_links(root, token_bytes_of(system))
    for name in fleet.names:
        fleet.tell(name, system_links)
    while fleet.directory.blocks < blocks:
        conversation = _random_links(draw, draw.randrange(*_CONVERSATION_LINKS))
        fleet.tell(draw.choice(fleet.names), conversation)
    known = fleet.directory.blocks

    def prompts(begin: Sequence[int] = ()) -> list[list[int]]:
        rest = prompt_tokens - len(begin)
        return [[*begin, *draw.choices(_VOCABULARY, k=rest)] for _ in range(_PROMPTS_OF_A_KIND)]

    def few(links: Sequence[bytes]) -> None:
        for name in draw.sample(fleet.names, min(4, replicas)):
            fleet.tell(name, links[: draw.randrange(length // 2, length)])

    def own_ends(links: Sequence[bytes]) -> None:
        for name in fleet.names:
            fleet.tell(name, links[: draw.randrange(1, length)])

    def nobody(links: Sequence[bytes]) -> None:
        pass

    def decided(ids: list[list[int]], prepare: Callable[[Sequence[bytes]], None]) -> Times:
        chains = [prompt_links(root, token_bytes_of(each)) for each in ids]
        for chain in chains:
            prepare(chain)
        ask = RouteRequest(prompt_tokens=prompt_tokens, max_tokens=256, flow=b"0")

        def decide(turn: int) -> None:
            # links of their own, as those of a request are
            links = [bytes(bytearray(link)) for link in chains[turn % len(chains)]]
            prefix = Prefix(lambda _: links)
            taken_us.append(_timed_us(fleet.router.decide, ask, prefix))

        taken_us: list[float] = []
        for turn in range(decisions):
            decide(turn)
        return _times(taken_us)

    gc.collect()
    gc.freeze()  # as a gateway does with what is there when it starts
    try:
        with fleet.at_work(draw, flows):
            ids = prompts()
            hashing = _times(
                [_timed_us(_hash, root, ids[turn % len(ids)]) for turn in range(decisions)]
            )
            return DecisionTimes(
                blocks=known,
                replicas=replicas,
                prompt_tokens=prompt_tokens,
                hashing=hashing,
                cold=decided(prompts(), nobody),
                system_prompt=decided(prompts(system), nobody),
                warm_on_few=decided(prompts(), few),
                own_end_each=decided(prompts(), own_ends),
            )
    finally:
        gc.unfreeze()


def _random_links(draw: random.Random, count: int) -> list[bytes]:
    """Links of a chain: as evenly distributed as hashes are."""
    together = draw.randbytes(count * HASH_BYTES)
    return [together[start : start + HASH_BYTES] for start in range(0, len(together), HASH_BYTES)]


def _hash(root: bytes, token_ids: Sequence[int]) -> None:
    prompt_links(root, token_bytes_of(token_ids))


def _timed_us(action: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> float:
    """CPU time: what other processes take of the machine is not ours."""
    began_ns = time.thread_time_ns()
    action(*args, **kwargs)
    return (time.thread_time_ns() - began_ns) / 1e3


def _times(taken_us: Sequence[float]) -> Times:
    hundredths = statistics.quantiles(taken_us, n=100)
    return Times(p50_us=hundredths[49], p99_us=hundredths[98])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway.dispatch.bench_decide", description=__doc__
    )
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument("--decisions", type=int, default=1000, help="of each kind of prompt")
    parser.add_argument("--flows", type=int, default=1, help="that have requests on each replica")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    found = asdict(
        measure(
            blocks=chosen.blocks,
            replicas=chosen.replicas,
            prompt_tokens=chosen.prompt_tokens,
            decisions=chosen.decisions,
            flows=chosen.flows,
        )
    )
    if chosen.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    for name, value in found.items():
        if isinstance(value, dict):
            shown = f"p50 {value['p50_us']:7.1f} µs   p99 {value['p99_us']:7.1f} µs"
        else:
            shown = f"{value:,}"
        sys.stdout.write(f"{name:<14} {shown}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
