"""The routing parts: which are asked for, what they sum up, and what a reader sees."""

from __future__ import annotations

import random

import orjson
import pytest

from loadtest.bench.cache_pairs import PairedRatio
from loadtest.bench.campaign import Report
from loadtest.bench.closed_loop import LoopOutcome
from loadtest.bench.completion import Completion, Failure
from loadtest.bench.measure import sum_up
from loadtest.bench.open_loop import arrival_times_s, exchange_at
from loadtest.bench.plan import routing_parts
from loadtest.bench.report import as_json
from loadtest.bench.routing import ROUTING_PARTS, RoutingFigures
from loadtest.bench.routing_decision import read_decision
from loadtest.bench.routing_policies import (
    LOADS,
    POLICIES,
    REPLICA_HEADER,
    PolicyFigure,
    PolicyLoad,
    policy_config,
    policy_prompts,
    sum_up_policy,
)
from loadtest.bench.routing_proxy import ProxyFigure
from loadtest.bench.routing_report import routing_notes, routing_tables
from loadtest.bench.routing_workers import WorkerFigures
from loadtest.bench.workloads import W1
from loadtest.stats.distribution import Distribution
from loadtest.target import Target
from loadtest.wire.connection import Answer, Endpoint
from tests.loadtest.fake_server import Call, Reply, fake_server

TARGET = Target("forebay", Endpoint("127.0.0.1", 1, "/v1"), "m")


def test_routing_stands_for_all_of_its_parts() -> None:
    assert routing_parts(["routing"]) == ROUTING_PARTS
    assert routing_parts(["W1", "routing-proxy"]) == ("routing-proxy",)
    assert routing_parts(["engine"]) == ()


def test_every_policy_gets_the_same_prompts() -> None:
    low, high, hot = (policy_prompts(load, TARGET, 3) for load in LOADS)

    assert low == policy_prompts(LOADS[0], TARGET, 3)
    assert low.at_s is not None
    assert len(low.at_s) == len(low.counted) == LOADS[0].requests
    assert high.at_s is None
    assert len({prompt[:1024] for prompt in low.before}) == 12
    assert {prompt[:1024] for prompt in low.counted} <= {prompt[:1024] for prompt in low.before}
    assert not {prompt[:1024] for prompt in low.before} & {prompt[:1024] for prompt in high.before}
    assert hot.before == ()
    assert len({prompt[:1024] for prompt in hot.counted}) == 1
    assert len(set(hot.counted)) == len(hot.counted)


def test_arrivals_come_at_their_rate_from_the_beginning_on() -> None:
    times = arrival_times_s(random.Random(1), 2000, 10.0)

    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.1)


async def test_an_open_loop_sends_without_waiting_for_answers() -> None:
    async def late(call: Call, reply: Reply) -> None:
        if len(server.calls) == 1:
            first.append(reply)
            return  # answered once the second request is there
        await first[0].whole(200, b"first")
        await reply.whole(200, call.path.encode())

    first: list[Reply] = []
    async with fake_server(late) as server:
        target = Target("s", server.endpoint, "m", timeout_s=5.0)
        requests = [server.endpoint.request("GET", path) for path in ("/1", "/2")]
        answers = await exchange_at(target, requests, [0.0, 0.05])

    assert [one.body if isinstance(one, Answer) else one for one in answers] == [b"first", b"/2"]
    assert server.connections == 2


def completion(cached_tokens: int, ttft_s: float = 0.1) -> Completion:
    return Completion("", ttft_s, 0.01, 1.0, 1088, 32, cached_tokens, 32, "")


def test_a_policys_figure_holds_hits_shares_and_throughput() -> None:
    load = PolicyLoad("high", 4, 12, clients=4)
    names = ["m/0", "m/1", "m/0", "m/0"]
    answers = [
        Answer(200, {REPLICA_HEADER: name}, [], float(at), at + 1.0, True)
        for at, name in enumerate(names)
    ]
    completions = [completion(cached) for cached in (1024, 1024, 0, 1024)]
    found = sum_up_policy("random", load, answers, completions)

    assert found.hit_rate == pytest.approx(0.75 * 1024 / 1088)
    assert found.ideal_hit_rate == pytest.approx(1024 / 1088)
    assert found.output_tokens_per_s == pytest.approx(4 * 32 / 4)
    assert found.shares == (0.75, 0.25)
    one = sum_up_policy("random", PolicyLoad("one", 4, 1), answers, completions)
    assert one.ideal_hit_rate == pytest.approx(0.75 * 1024 / 1088)  # its first finds nothing


def times(p50_us: float) -> dict[str, float]:
    return {"p50_us": p50_us, "p99_us": 2 * p50_us}


def distribution(p50: float) -> Distribution:
    found = Distribution.of([p50])
    assert found is not None
    return found


def policy_figure(policy: str, scale: float) -> PolicyFigure:
    return PolicyFigure(
        policy, "low", distribution(10 * scale), 0.9 / scale, 0.94, 100 / scale, (0.5, 0.5)
    )


def figures() -> RoutingFigures:
    kinds = ("hashing", "cold", "system_prompt", "warm_on_few", "own_end_each")
    looked_up = ("cold", "system_prompt", "half_warm_on_few", "own_end_each")
    decision = read_decision(
        {"blocks": 10, "replicas": 64, "prompt_tokens": 32_768}
        | {kind: times(50.0) for kind in kinds},
        {"resident_bytes": 106e6} | {kind: times(7.0) for kind in looked_up},
    )
    proxy = ProxyFigure(
        *("SSE, 16 events", "1 process", 32, distribution(0.15), distribution(0.4)),
        *(0.25, 7000.0, 3000.0, 0.21),
    )
    report = Report("worker process", "m", (sum_up(W1, 0, LoopOutcome((), 0.0)),), None)
    failed = sum_up(W1, 0, LoopOutcome((Failure("all", "cut"),), 0.0))
    workers = WorkerFigures(
        (report, Report("in-process", "m", (failed,), None)),
        {"W1 output": PairedRatio(0.98, 0.97, 0.99, 3)},
    )
    policies = tuple(policy_figure(policy, 1 + at) for at, policy in enumerate(POLICIES))
    return RoutingFigures(decision, (proxy,), policies, workers)


def test_tables_show_every_part() -> None:
    decision, proxy, policies, leads, workers = (one.text() for one in routing_tables(figures()))

    assert "100, 500" in decision
    assert proxy.splitlines()[-1].split()[-1] == "0.210"
    assert "0.250" in proxy
    assert "predicted-ttft, low" in policies
    assert leads.splitlines()[2].split()[-4:] == ["+45.0", "2.00×", "2.00×", "2.00×"]
    assert workers.splitlines()[-1].split()[-3:] == ["0.980", "0.970–0.990", "3"]
    assert routing_tables(RoutingFigures(None, None, None, None)) == []


def test_notes_and_json_hold_the_rest() -> None:
    found = figures()
    assert routing_notes(found) == [
        "decisions: prompts of 32,768 tokens, 64 replicas, 10 blocks in the directory at 106 bytes "
        "each",
        "FAILED: W1: cut",
    ]
    document = orjson.loads(as_json([], [], [], routing=found))
    assert document["routing"]["proxy"][0]["cpu_s"] == 0.21


def test_the_policy_is_all_that_differs() -> None:
    first, second = (policy_config(policy).splitlines() for policy in POLICIES[:2])
    assert [(a, b) for a, b in zip(first, second, strict=True) if a != b] == [
        ("routing: {policy: predicted-ttft}", "routing: {policy: round-robin}")
    ]
