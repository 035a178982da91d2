"""`loadtest run`: exit codes, what is printed and written, and what is wrong use."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from loadtest.record import Outcome
from loadtest.run_file import read_run
from tests.loadtest.cli.serving import KEY, SMALL, answer, asked, command, served, url
from tests.loadtest.fake_server import Call, Reply


def test_a_load_that_was_answered_ends_with_0_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, page = tmp_path / "run.json.gz", tmp_path / "page.html"
    arguments = ("run", "--key", KEY, *SMALL, "--requests", "6", "--concurrency", "2", "--seed")
    monkeypatch.setattr(sys, "argv", ["loadtest", *arguments, "7"])
    with served() as server:
        code, output = command(
            *(*arguments, "7", url(server), "--ttft-ms", "60000", "--usd-per-hour", "2"),
            *("--price", "input=1,output=2", "--json", str(kept), "--html", str(page)),
        )
    run = read_run(kept)

    assert code == 0, output
    assert "all 6 requests answered whole and as asked" in output
    assert "seed 7" in output
    assert {call.headers["authorization"] for call in asked(server)} == {f"Bearer {KEY}"}
    assert {call.body["model"] for call in asked(server)} == {"the-model"}
    assert len(asked(server)) == 6 + 8
    assert [record.outcome for record in run.records] == [Outcome.OK] * 6
    assert [record.price_nusd for record in run.records] == [24_000] * 6
    assert run.usd_per_hour == 2
    assert run.settings["warm-up requests"] == "8"
    assert run.command.endswith("--seed 7")
    assert KEY not in output + page.read_text() + run.command + kept.read_bytes().hex()


def test_a_seed_is_drawn_said_and_kept_and_no_warm_up_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    with served() as server:
        code, output = command(
            *("run", url(server), *SMALL, "--requests", "2", "--json", str(kept), "--markdown")
        )
    drawn = output.splitlines()[0]
    prompts = [tuple(call.body["prompt"]) for call in asked(server)]

    assert code == 0
    assert drawn.startswith("seed ")
    assert read_run(kept).command.endswith(f"--seed {drawn.removeprefix('seed ')}")
    assert "| time to first token |" in output
    assert len(set(prompts)) == len(prompts) == 10


async def wants_key(call: Call, reply: Reply) -> None:
    """Lets nobody in without the key."""
    if call.headers.get("authorization") == f"Bearer {KEY}":
        await answer(call, reply)
    else:
        await reply.whole(401, b"{}")


async def is_late(call: Call, reply: Reply) -> None:
    """Lists models, and refuses the rest with the key in its reason."""
    if call.method == "POST":
        await reply.whole(503, f'{{"error": {{"message": "{KEY} is late."}}}}'.encode())
    else:
        await answer(call, reply)


def test_one_refused_request_ends_with_1_and_its_reason_has_no_key(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with served(is_late) as server:
        code, output = command(
            *("run", url(server), *SMALL, "--requests", "2", "--warm-up", "0"),
            *("--html", str(page)),
            FOREBAY_API_KEY=KEY,
        )

    assert code == 1
    assert "2 × status 503: [key] is late. (no Retry-After)" in output
    assert "Latency" not in output
    assert "cache" not in output
    assert "Not known: no request was answered whole" in page.read_text()
    assert KEY not in output + page.read_text()


def test_a_run_whose_whole_warm_up_fails_ends_with_its_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with served(is_late) as server:
        code, output = command(
            *("run", url(server), *SMALL, "--requests", "9", "--warm-up", "2", "--seed", "1"),
            *("--html", str(page)),
            FOREBAY_API_KEY=KEY,
        )

    assert (code, output) == (
        1,
        "loadtest: 2 of 2 warm-up requests failed, the first with: status 503: [key] is late. "
        "(no Retry-After)\n",
    )
    assert len(asked(server)) == 2
    assert not page.exists()


def test_models_are_listed_with_the_key_of_a_plans_tenant(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "seed: 11\nconcurrency: 2\ntenants:\n"
        "  - {name: a, key_env: A_KEY, workload: unique, requests: 2,\n"
        "     parameters: {prompt_tokens: 20, output_tokens: 2}}\n"
    )
    with served(wants_key) as server:
        arguments = ("run", url(server), "--plan", str(plan), "--warm-up", "1")
        code, output = command(*arguments, A_KEY=KEY)

    assert code == 0, output
    assert KEY not in output


def test_the_demo_key_opens_a_server_of_this_machine_that_wants_one(tmp_path: Path) -> None:
    (tmp_path / "demo-key").write_text(f"{KEY}\n")
    with served(wants_key) as server:
        arguments = ("run", url(server), *SMALL, "--requests", "2", "--model", "the-model")
        code, output = command(*arguments, FOREBAY_STATE_DIR=str(tmp_path))
        without = command(*arguments, "--seed", "1")

    assert code == 0, output
    assert "opened by this machine's demo key" in output
    assert KEY not in output
    assert without[0] == 1
    assert "8 of 8 warm-up requests failed, the first with: status 401" in without[1]


def test_ctrl_c_ends_the_load_and_keeps_what_had_ended(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    posts = 0

    async def answer_two(call: Call, reply: Reply) -> None:
        nonlocal posts
        posts += call.method == "POST"
        if posts < 3:
            await answer(call, reply)
        else:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGINT)
    with served(answer_two) as server:
        code, output = command(
            *("run", url(server), *SMALL, "--requests", "9", "--concurrency", "1"),
            *("--warm-up", "0", "--json", str(kept)),
        )

    assert code == 130
    assert output.splitlines()[-1] == "loadtest: interrupted"
    assert "2 of 2 requests answered whole" in output
    assert "1 requests were open and are in no figure, 6 of 9 were never sent" in output
    assert len(read_run(kept).records) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_plan_brings_its_seed_its_keys_and_its_promises(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "seed: 11\nconcurrency: 2\ntenants:\n"
        "  - {name: a, key_env: A_KEY, workload: unique, requests: 2, slo: {ttft_ms: 60000},\n"
        "     parameters: {prompt_tokens: 20, output_tokens: 2}}\n"
    )
    with served() as server:
        code, output = command(
            *("run", url(server), "--plan", str(plan), "--warm-up", "0"), A_KEY=KEY
        )
        lacking = command("run", url(server), "--plan", str(plan))
        broken = command("run", url(server), "--plan", str(plan), A_KEY=f"{KEY}\n")

    assert code == 0, output
    assert "seed 11" in output
    assert "TTFT ≤ 60000 for 95 %" in output
    assert {call.headers["authorization"] for call in asked(server)} == {f"Bearer {KEY}"}
    assert lacking == (2, "loadtest: tenants a: A_KEY is not set\n")
    assert broken[0] == 2
    assert broken[1].startswith("loadtest: A_KEY: the API key has spaces around it")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "nowhere: is no URL"),
        (("http://u:pw@h/v1",), "has no user, password, query or fragment"),
        (("http://a..b/v1",), "http://a..b/v1: must look like"),
        (("forebay", "--model", "m"), "--model: is for URLs and files"),
        (("-w", "nothing"), "no workload nothing"),
        (("-s", "groups"), "groups: must be name=value"),
        (("-s", "depth=3"), "depth: unknown parameter"),
        (("--arrivals", "gama"), "--arrivals: no gama; there are"),
        (("--arrivals", "poisson"), "--rate is needed"),
        (("--rate", "1", "--concurrency", "2"), "--rate and --concurrency: give one"),
        (("--cv", "3", "--concurrency", "2"), "--cv and --concurrency: give one"),
        (("--arrivals", "closed", "--rate", "1", "--concurrency", "2"), "--rate is of no use"),
        (("peer:vlm",), "vlm: no such peer; there are"),
        (("nowhere.yaml",), "nowhere.yaml: cannot be read"),
        (("--seconds", "5"), "seconds: a closed loop"),
        (("--rate", "1", "--seconds", "inf"), "seconds: must be more than 0"),
        (("--target", "0.9"), "--target: is the share"),
        (("--price", "all=1"), "--price: "),
        (("--key", "sk 1\n"), "the API key has"),
        (("--plan", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("--plan", "nowhere.yaml", "-w", "rag"), "--workload: is of no use with --plan"),
        (("--plan", "nowhere.yaml", "--rate", "1"), "--plan: has its own"),
        (("--plan", "nowhere.yaml", "--ttft-ms", "1"), "--plan: has its tenants' own promises"),
        (("--json", "/no/such/run.json"), "/no/such/run.json: cannot be written"),
        (("--html", "/tmp"), "/tmp: cannot be written (it is a directory)"),
        (("--requests", "0"), "--requests"),
    ],
)
def test_wrong_use_ends_with_2_and_names_what_is_wrong(
    arguments: tuple[str, ...], said: str
) -> None:
    code, output = command("run", *arguments, "--seed", "1")

    assert (code, said in output) == (2, True), output
    assert "sk 1" not in output


def test_a_server_that_is_not_there_is_one_line() -> None:
    assert command("run", "http://127.0.0.1:1/v1", "--seed", "1") == (
        1,
        "loadtest: 127.0.0.1:1: cannot connect (Connection refused); is `forebay serve` running?\n",
    )
