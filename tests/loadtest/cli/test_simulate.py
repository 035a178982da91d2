"""`loadtest simulate`: one object, a table for several questions, and what is wrong use."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from loadtest.run_file import read_run
from tests.loadtest.cli.serving import command

SMALL = ("--trace", "mooncake", "--requests", "40")


def test_one_question_is_one_object() -> None:
    code, output = command("simulate", *SMALL, "--replicas", "4", "--json", "--ttft-ms", "2000")
    found = orjson.loads(output[output.index("{") :])

    assert code == 0
    assert 0 <= found["hit_rate"] <= found["ideal_hit_rate"] <= 1
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p95"]
    assert found["goodput_rps"] > 0


def test_several_questions_are_a_table_and_files_of_their_own(tmp_path: Path) -> None:
    code, output = command(
        *("simulate", *SMALL, "--replicas", "2,4", "--policy", "round-robin"),
        *("--records", str(tmp_path / "of.json.gz"), "--html", str(tmp_path / "page.html")),
    )

    assert code == 0
    assert "2 replicas" in output
    assert "requests, 0 s" not in output
    assert [read_run(tmp_path / f"of-{n}.json.gz").name for n in (1, 2)] == [
        "2 replicas",
        "4 replicas",
    ]
    assert "Simulated" in (tmp_path / "page.html").read_text()


def test_a_plan_is_simulated(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "tenants: [{name: a, workload: unique, requests: 3,"
        " arrivals: {pattern: poisson, rate: 9}}]\n"
    )
    code, output = command("simulate", "--plan", str(plan))

    assert code == 0, output
    assert "3 requests" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one of --trace, --workload and --plan"),
        (("--trace", "no.jsonl"), "no.jsonl: cannot be read"),
        ((*SMALL, "--replicas", "some"), "--replicas: some is no whole number; give one"),
        ((*SMALL, "--replicas", "8,"), "--replicas: nothing is no whole number"),
        ((*SMALL, "--split", "2"), "--split: 2 is no such thing"),
        ((*SMALL, "--replicas", "3", "--split", "1:1"), "--split: 3 replicas cannot be divided"),
        ((*SMALL, "--batching", "often"), "--batching: often is none of"),
        ((*SMALL, "--kind", "a-gpu"), "--kind: is one of"),
        (("-w", "unique", "--speed", "2"), "are for a recording"),
        (("-w", "W3"), "a closed loop cannot be simulated"),
        (("--plan", "no.yaml", "--requests", "2"), "--plan: has its own"),
        ((*SMALL, "--records", "/no/such.json"), "/no/such.json: cannot be written"),
        ((*SMALL, "--rate", "2"), "--set, --rate, --cv: a recording has its own"),
    ],
)
def test_wrong_use_ends_with_2(arguments: tuple[str, ...], said: str) -> None:
    code, output = command("simulate", *arguments)

    assert (code, said in output) == (2, True), output
