"""`loadtest simulate`: options have their effect, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from loadtest.cli.main import app


def simulate(*options: str) -> Any:
    result = CliRunner().invoke(app, ["simulate", *options, "--json"])
    assert result.exit_code == 0, result.output
    return orjson.loads(result.stdout)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    path = tmp_path / "two.jsonl"
    lines = [
        {"at_s": float(at // 3), "prompt_tokens": 64, "output_tokens": 4, "blocks": [1, at]}
        | {"block_tokens": 32}
        for at in range(9)
    ]
    path.write_bytes(b"\n".join(orjson.dumps(line) for line in lines))
    return str(path)


@pytest.mark.parametrize(
    "options",
    [
        ["--block-tokens", "32"],
        ["--batch-size", "4"],
        ["--window-ms", "10"],
        ["--queue-ms", "10"],
        ["--rate", "3"],
        ["--batching", "sometimes"],
    ],
)
def test_what_would_say_nothing_is_refused(recording: str, options: list[str]) -> None:
    result = CliRunner().invoke(app, ["simulate", "--trace", recording, *options])
    assert result.exit_code == 2
    assert options[0] in result.output


def test_a_workload_is_no_recording() -> None:
    for option in (["--speed", "2"], ["--spread"]):
        result = CliRunner().invoke(app, ["simulate", "-w", "unique", "--requests", "2", *option])
        assert result.exit_code == 2


def test_one_object_has_its_figures_at_the_top(recording: str) -> None:
    told = simulate("--trace", recording)
    assert told["hit_rate"] == pytest.approx(8 / 18)
    assert {"p50", "p95"} <= told["ttft_ms"].keys()
    assert told["goodput_rps"] > 0
    assert told["requests"] == 9


def test_the_endless_cache_stands_beside_any_policy(recording: str) -> None:
    told = simulate(
        *("--trace", recording, "--oracle", "--policy", "round-robin,random"),
        *("--replicas", "2,4"),
    )
    names = [each["name"] for each in told["results"]]
    assert names == [
        "2 replicas, round-robin",
        "2 replicas, endless cache",
        "2 replicas, random",
        "4 replicas, round-robin",
        "4 replicas, endless cache",
        "4 replicas, random",
    ]


def test_what_came_at_one_tick_is_spread_until_the_next(recording: str) -> None:
    at_once, spread = (
        simulate("--trace", recording, "--no-prompt-cache", *more) for more in ([], ["--spread"])
    )
    assert spread["simulated_s"] > at_once["simulated_s"]
    assert spread["ttft_ms"]["p95"] <= at_once["ttft_ms"]["p95"]


def test_who_may_wait_for_a_better_moment_does(recording: str) -> None:
    slow = ("--trace", recording, "--max-running", "1", "--ttft-ms", "15", "--admission")
    assert simulate(*slow)["queue"]["gate_queued"] == 0
    assert simulate(*slow, "--queue-ms", "5000")["queue"]["gate_queued"] > 0
