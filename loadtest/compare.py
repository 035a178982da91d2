"""Several servers or settings measured in turn, so that what differs is them and not the hour."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice

from loadtest.bench.campaign import CampaignError
from loadtest.comparison import DEFAULT_HEADLINE, Attempt, Comparison
from loadtest.metrics import ERRORS, METRICS
from loadtest.plan import Load
from loadtest.record import Run
from loadtest.stopping import StoppedError
from loadtest.summary import figures_of
from loadtest.wire.connection import ExchangeError

_SEEDS_OF_A_COMPARISON = 1000


@dataclass(frozen=True, slots=True)
class Contender:
    """`measure(seed)` runs one load, the same one for the same seed, and returns when its last
    answer has ended. It raises CampaignError, ExchangeError or OSError if it could not. Warming
    up, once and before the comparison begins, is for whoever makes it."""

    name: str
    measure: Callable[[int], Awaitable[Run]]


async def compare(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    seed: int,
    rest_s: float = 1.0,
    headline: str = DEFAULT_HEADLINE,
    tell: Callable[[str], None],
) -> Comparison:
    """Run every contender once in each round, all with the same seed, in an order that `orders`
    balances, with a rest before each: the threads of the one before may spin for a while after
    their last work, on the next one's cores.

    `headline` is the metric that the comparison is about, chosen before it is seen. A contender
    that could not be run is noted as failed for the round and tried again in the next.
    StoppedError of a `measure` ends the comparison with the attempts there are. Raises ValueError
    as `check_terms` does, and whatever else `measure` raises.
    """
    names = tuple(contender.name for contender in contenders)
    check_terms(names, rounds=rounds, headline=headline)
    attempts: list[Attempt] = []
    with suppress(StoppedError):
        for number, place, index in _in_turn(len(names), rounds):
            tell(f"{names[index]}: round {number + 1} of {rounds}")
            if attempts:
                await asyncio.sleep(rest_s)
            # A space of seeds for each comparison's seed, so that two comparisons share none.
            round_seed = seed * _SEEDS_OF_A_COMPARISON + number
            attempt = await _attempt(contenders[index], number + 1, place + 1, round_seed)
            if attempt.failure is not None:
                tell(f"{attempt.contender}: {attempt.failure}")
            attempts.append(attempt)
    return Comparison.of(names, attempts, seed=seed, headline=headline)


def check_terms(names: Sequence[str], *, rounds: int, headline: str) -> None:
    """Raises ValueError if no comparison can be made of these."""
    if len(set(names)) < len(names) or len(names) < 2:
        raise ValueError("a comparison has two contenders or more, each with a name of its own")
    if not 1 <= rounds <= _SEEDS_OF_A_COMPARISON:
        raise ValueError(f"rounds are 1 to {_SEEDS_OF_A_COMPARISON}, not {rounds}")
    if headline not in METRICS:
        raise ValueError(f"headline {headline}: no such metric; there are {', '.join(METRICS)}")


def how_long(load: Load, *, rounds: int, servers: int) -> str:
    """In one line how much is to be run, and at least how long it takes where that can be known:
    the load's times, but not the warm-up, the starts and the rests."""
    runs = rounds * servers
    in_turn = f"{rounds:,} round{'s' if rounds > 1 else ''} × {servers} servers"
    what = f"{in_turn} = {runs:,} runs of {load.requests:,} requests"
    if load.concurrency is not None:
        return f"{what}, which take as long as the servers need"
    sending_s = max((session.start_s for session in load.sessions), default=0.0)
    return f"{what} in {_about(sending_s)}: {_about(runs * sending_s)} at least"


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def orders(count: int) -> Iterator[tuple[int, ...]]:
    """Without end, the order of each round for `count` contenders.

    Every other round is the one before it backwards, so that a machine that slowly warms up weighs
    on all alike. The rounds of one cycle, of which there are `count` (twice as many if that is
    odd), put each contender in each place, and right behind each other, equally often (E. J.
    Williams, "Experimental Designs Balanced for the Estimation of Residual Effects of Treatments",
    1949): so nobody always follows the one that leaves the machine hot. Two contenders go AB, BA.
    """
    zigzag = [place // 2 if place % 2 == 0 else count - 1 - place // 2 for place in range(count)]
    for shift in cycle(range(count // 2 if count % 2 == 0 else count)):
        order = tuple((index + shift) % count for index in zigzag)
        yield order
        yield order[::-1]


def _in_turn(count: int, rounds: int) -> Iterator[tuple[int, int, int]]:
    """Round, place in it and contender, all from 0, of each attempt."""
    for number, order in enumerate(islice(orders(count), rounds)):
        for place, index in enumerate(order):
            yield number, place, index


async def _attempt(contender: Contender, number: int, place: int, seed: int) -> Attempt:
    values: dict[str, float | None] = dict.fromkeys(METRICS)
    try:
        run = await contender.measure(seed)
    except (CampaignError, ExchangeError, OSError) as error:
        # Nothing of it was answered; a figure for anything else there is not.
        values[ERRORS] = 100.0
        why = str(error) or type(error).__name__
        return Attempt(contender.name, number, place, seed, values, failure=why)
    figures = figures_of(run.records, run.tenants, run.wall_s, run.usd_per_hour)
    values = {name: metric.value(figures) for name, metric in METRICS.items()}
    complaints = () if run.client is None else run.client.complaints
    return Attempt(contender.name, number, place, seed, values, complaints=complaints)
