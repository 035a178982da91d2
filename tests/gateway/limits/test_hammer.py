"""Two gateways of four workers each, with clocks that disagree, ask for more than is allowed."""

from __future__ import annotations

import multiprocessing
from itertools import pairwise
from multiprocessing.connection import Connection

from tests.cache.valkey import Valkey
from tests.gateway.limits.hammer import (
    BUDGET,
    COST,
    PLACES,
    RPM,
    SHAPE,
    TOKENS,
    TPM,
    Seen,
    hammer,
)

WORKERS = 4
SKEWS_S = (45.0, -45.0)
FOR_S = 2.6


def most_in_a_span(moments_us: list[int]) -> int:
    """The most that came within one span, wherever it begins."""
    first = most = 0
    for last, moment_us in enumerate(moments_us):
        while moment_us - moments_us[first] >= SHAPE.span_us:
            first += 1
        most = max(most, last - first + 1)
    return most


def test_all_processes_together_are_held_to_the_limit(valkey: Valkey) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([hammer.__module__])
    pipes: list[Connection] = []
    processes = []
    for skew_s in SKEWS_S:
        for _ in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=hammer, args=(theirs, valkey.url, skew_s, FOR_S))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("start")
        seen: list[Seen] = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
        for pipe in pipes:
            pipe.close()

    assert not any(each.degraded for each in seen)
    assert all(each.refused > 0 for each in seen)
    admitted = {
        name: sorted(moment for each in seen for moment in each.admitted_us[name])
        for name in seen[0].admitted_us
    }
    # never more in any second, and all of it in the first one
    for name, most in (("requests", RPM), ("tokens", TPM // TOKENS)):
        moments = admitted[name]
        assert most_in_a_span(moments) == most
        assert len(moments) >= 2 * most
        assert all(later >= earlier for earlier, later in pairwise(moments))
        refilled_us = moments[most] - moments[0]
        assert SHAPE.span_us < refilled_us < SHAPE.span_us + 10 * SHAPE.width_us
    assert max(each.most_places for each in seen) == PLACES
    assert len(admitted["budget"]) == BUDGET // COST

    with valkey.client() as client:
        assert int(client.hget("forebay:limits:{budget}", "t|m$")) == BUDGET // COST * COST
        assert int(client.hget("forebay:limits:{places}", "t|c")) == 0
        for tenant in ("requests", "tokens", "places", "budget"):
            assert client.zcard(f"forebay:limits:{{{tenant}}}:leases") == 0
