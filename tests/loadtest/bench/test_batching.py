"""The batching part: the same requests for every mode, and what the figures say."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
import yaml

from gateway.settings import Settings
from loadtest.bench import batching
from loadtest.bench.batching import (
    BatchingPlan,
    BatchingRun,
    ModeFigure,
    batching_config,
    drawn,
    measure_batching,
    sum_up,
)
from loadtest.bench.batching_report import batching_note, batching_tables
from loadtest.bench.campaign import CampaignError
from loadtest.bench.completion import Completion
from loadtest.bench.report import as_json
from loadtest.bench.tenants_load import Fate, Shape
from loadtest.forebay_server import RunningServer
from policies.batching import Batching, BatchingMode
from tests.loadtest.fake_server import answer_well, fake_server

PLAN = BatchingPlan(
    requests=8,
    seconds=0.05,
    long_requests=2,
    long=Shape(6, 9),
    short_prompt_tokens=4,
    short_outputs=(2, 3),
    size=4,
)


def fate(ttft_s: float, e2e_s: float, output_tokens: int, at_s: float = 0.0) -> Fate:
    answer = Completion("", ttft_s, 0.01, e2e_s, 4, output_tokens, 0, output_tokens, "")
    return Fate(at_s, at_s + e2e_s, answer)


def figure(mode: BatchingMode, ttft_s: float) -> ModeFigure:
    short = [fate(ttft_s, ttft_s + 0.1, 10, at_s) for at_s in (0.0, 1.0)]
    return sum_up(mode, [BatchingRun(short, [fate(ttft_s, 4.0, 180)])])


def test_what_is_sent_is_drawn_once_for_all_modes():
    plan = BatchingPlan()
    work = drawn(plan, "a")
    assert work == drawn(plan, "a") != drawn(plan, "b")
    assert sum(map(len, work.values())) == plan.requests
    assert len(work[plan.long]) == plan.long_requests
    assert all(0 <= at_s <= plan.seconds for times in work.values() for at_s in times)
    assert {shape.output_tokens for shape in work} <= {*range(8, 17), 200}
    with pytest.raises(ValueError, match="no whole batches of 8"):
        BatchingPlan(requests=81)


@pytest.mark.parametrize("mode", BatchingMode)
def test_configurations_load_and_differ_in_the_mode_alone(mode):
    model = Settings.model_validate(yaml.safe_load(batching_config(mode, PLAN))).models[0]
    assert model.max_running == PLAN.size
    sized = mode is not BatchingMode.CONTINUOUS
    assert model.batching.policy == (Batching(mode, PLAN.size) if sized else Batching())


async def test_every_mode_gets_the_same_requests_in_every_round(monkeypatch):
    configs: list[str] = []

    @asynccontextmanager
    async def stub(*, config: str) -> AsyncIterator[RunningServer]:
        configs.append(config)
        yield RunningServer(server.endpoint, os.getpid(), 0.0, Path())

    async def not_warmed_up(target: object, seed: int) -> None:
        pass

    monkeypatch.setattr(batching, "running_forebay", stub)
    monkeypatch.setattr(batching, "warm_up", not_warmed_up)
    async with fake_server(answer_well) as server:
        found = await measure_batching(rounds=2, seed=1, tell=lambda _: None, plan=PLAN)
    assert [len(set(configs)), len(server.calls)] == [3, 3 * 2 * PLAN.requests]
    prompts = [tuple(call.body["prompt"]) for call in server.calls]
    assert all(prompts.count(prompt) == 3 for prompt in prompts)
    assert [one.mode for one in found.modes] == ["continuous", "dynamic", "static"]
    for one in found.modes:
        assert (one.short.ttft_ms.count, one.long.e2e_ms.count) == (12, 4)
        assert len(one.output_tokens_per_s) == 2


def test_a_request_that_is_turned_away_ends_the_bench():
    with pytest.raises(CampaignError, match="static: a request was turned away"):
        sum_up(BatchingMode.STATIC, [BatchingRun([Fate(0.0, 1.0, None, shed=True)], [])])


def test_tables_note_and_json_say_who_waited_for_whom():
    modes = (
        figure(BatchingMode.CONTINUOUS, 0.2),
        figure(BatchingMode.DYNAMIC, 0.5),
        figure(BatchingMode.STATIC, 3.0),
    )
    assert modes[0].output_tokens_per_s == (50.0,)  # 200 tokens until the long one ends, after 4 s
    found = batching.BatchingFigures(modes, PLAN)
    waits, ratios = (table.text().splitlines() for table in batching_tables(found))
    assert waits[2].split() == ["continuous:", "short", "2", "200", "200", "300", "300", "50.0"]
    assert waits[7].split() == ["static:", "long", "1", "3,000", "3,000", "4,000", "4,000"]
    assert ratios[2].split() == ["short", "TTFT", "p50", "2.50×", "15.00×"]
    assert "2 of them with answers of 9 tokens, the others of 2 to 3; 4 at" in batching_note(found)
    document = orjson.loads(as_json([], [], [], batching=found))["batching"]
    assert document["modes"][2]["mode"] == "static"
    assert document["modes"][2]["short"]["ttft_ms"]["p95"] == 3000
