"""`loadtest compare`: exit codes, files, and what is wrong use."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from loadtest.compare import compare as run_in_turn
from loadtest.run_file import read_run
from tests.loadtest.cli.serving import KEY, SMALL, answer, asked, command, served, url
from tests.loadtest.fake_server import Call, Reply


@pytest.fixture(autouse=True)
def _without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake servers need none between measurements."""
    monkeypatch.setattr("loadtest.cli.compare.run_in_turn", partial(run_in_turn, rest_s=0.0))


def test_every_round_sends_all_the_same_and_is_kept(tmp_path: Path) -> None:
    kept, page = tmp_path / "run.json", tmp_path / "page.html"
    with served() as one, served() as other:
        code, output = command(
            *("compare", f"a={url(one)}", f"b={url(other)}", *SMALL, "--requests", "3"),
            *("--rounds", "3", "--warm-up", "2", "--seed", "4", "--headline", "TTFT p50"),
            *("--json", str(kept), "--html", str(page)),
            FOREBAY_API_KEY=KEY,
        )
    prompts = [sorted(tuple(call.body["prompt"]) for call in asked(each)) for each in (one, other)]

    assert code == 0, output
    assert "TTFT p50" in output
    assert "3 rounds, each with all contenders" in output
    assert "3 rounds × 2 servers = 6 runs of 3 requests, which take" in output
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == len(prompts[0]) == 3 * 3 + 2
    assert sorted(path.name for path in tmp_path.glob("run-*.json")) == [
        f"run-{number}.json" for number in range(1, 7)
    ]
    assert [read_run(tmp_path / f"run-{n}.json").name for n in range(1, 5)] == ["a", "b", "b", "a"]
    assert KEY not in output + page.read_text()


def test_a_server_that_is_held_against_itself_does_not_find_its_own_prompts() -> None:
    with served() as one:
        code, output = command(
            *("compare", f"a={url(one)}", f"b={url(one)}", f"c={url(one)}", *SMALL),
            *("--requests", "2", "--rounds", "2", "--warm-up", "0", "--seed", "4"),
        )
    prompts = [tuple(call.body["prompt"]) for call in asked(one)]

    assert code == 0, output
    assert "b: has prompts of its own, as another is the same server" in output
    assert len(set(prompts)) == len(prompts) == 3 * 2 * 2


def test_requests_that_failed_end_with_1() -> None:
    async def refuse(call: Call, reply: Reply) -> None:
        if call.method == "POST":
            await reply.whole(500, b"{}")
        else:
            await answer(call, reply)

    with served() as one, served(refuse) as other:
        code, output = command(
            *("compare", f"a={url(one)}", f"b={url(other)}", *SMALL, "--requests", "2"),
            *("--rounds", "1", "--warm-up", "0", "--seed", "4"),
        )

    assert code == 1
    assert "100 % of b's requests failed" in output


def test_servers_that_answer_no_warm_up_end_with_1_and_the_reason(tmp_path: Path) -> None:
    async def refuse(call: Call, reply: Reply) -> None:
        if call.method == "POST":
            await reply.whole(401, b"{}")
        else:
            await answer(call, reply)

    page = tmp_path / "page.html"
    with served(refuse) as one, served(refuse) as other:
        code, output = command(
            *("compare", f"a={url(one)}", f"b={url(other)}", *SMALL, "--requests", "9"),
            *("--rounds", "1", "--warm-up", "1", "--seed", "4", "--html", str(page)),
        )

    assert code == 1
    assert "a: 1 of 1 warm-up requests failed, the first with: status 401" in output
    assert output.splitlines()[-1].startswith("loadtest: nothing could be measured")
    assert len(asked(one)) == len(asked(other)) == 1
    assert not page.exists()


def test_ctrl_c_keeps_the_runs_that_had_ended(tmp_path: Path) -> None:
    async def interrupt(call: Call, reply: Reply) -> None:
        if call.method == "POST":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        await answer(call, reply)

    kept = tmp_path / "run.json"
    with served() as one, served(interrupt) as other:
        code, output = command(
            *("compare", f"a={url(one)}", f"b={url(other)}", *SMALL, "--requests", "2"),
            *("--rounds", "2", "--warm-up", "0", "--seed", "4", "--json", str(kept)),
            *("--concurrency", "1"),
        )

    assert code == 130
    assert output.splitlines()[-1] == "loadtest: interrupted after 1 of 4 runs"
    assert read_run(kept).name == "a"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("http://h/v1",), "a comparison needs two servers"),
        (("http://h/v1", "http://h/v1"), "h:80: two servers have this name"),
        (("forebay", "a=forebay", "--headline", "speed"), "headline speed: no such metric"),
        (("forebay", "a=forebay", "--rounds", "2000"), "rounds are 1 to 1000"),
        (("forebay", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("forebay", "peer:vlm"), "vlm: no such peer"),
        (("forebay", "peer:smg"), "smg is a router"),
    ],
)
def test_wrong_use_ends_with_2_before_anything_is_started(
    arguments: tuple[str, ...], said: str
) -> None:
    code, output = command("compare", *arguments)

    assert (code, said in output) == (2, True), output
    assert "starting" not in output
