"""`loadtest find-max`: exit codes, files, and what is wrong use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.cli import find_max as cli_find_max
from loadtest.measuring import Manner
from loadtest.plan import Load
from loadtest.record import Outcome, Record, Run
from loadtest.run_file import read_run
from loadtest.target import Target
from tests.loadtest.cli.serving import KEY, SMALL, command, served, url

KNEE = 3.0
"""Sessions per second from which the faked server is too late."""


class Measured:
    """In place of real runs: they take no time, and know what rate they were made at."""

    def __init__(self, interrupted_at: int = 0) -> None:
        self.loads: list[Load] = []
        self.warm: list[int] = []
        self._interrupted_at = interrupted_at

    async def __call__(
        self, at: Target, load: Load, manner: Manner, *, warm_up: Any, settings: dict[str, str]
    ) -> Run:
        self.loads.append(load)
        self.warm.append(len(warm_up))
        if len(self.loads) == self._interrupted_at:
            assert manner.stop is not None
            os.kill(os.getpid(), signal.SIGINT)
            await manner.stop.wait()
        late = float(settings["rate"].split()[0]) > KNEE
        records = [
            Record(i, s.start_s, s.start_s, s.start_s + 2, Outcome.OK, 20, 2, first, first, first)
            for i, s in enumerate(load.sessions)
            for first in [s.start_s + (1.5 if late else 0.1)]
        ]
        return Run(
            *(at.name, "live", at.name, load.title, manner.command, "", 30.0),
            *(records, load.tenants, {**manner.settings, **settings}),
        )


def faked(monkeypatch: pytest.MonkeyPatch, **more: int) -> Measured:
    fake = Measured(**more)
    monkeypatch.setattr(cli_find_max, "measured", fake)
    return fake


SEARCH = (*SMALL, "--ttft-ms", "500", "--target", "0.5", "--seed", "3", "--precision", "0.3")


def test_the_rate_is_found_and_every_run_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = faked(monkeypatch)
    kept, page = tmp_path / "run.json", tmp_path / "page.html"
    with served() as server:
        code, output = command(
            *("find-max", url(server), *SEARCH, "--json", str(kept), "--html", str(page)),
            FOREBAY_API_KEY=KEY,
        )
    prompts = [tuple(s.turns[0].tokens or ()) for load in fake.loads for s in load.sessions]

    assert code == 0, output
    assert "2.83 sessions/s hold TTFT ≤ 500 ms for 50 %" in output
    assert fake.warm == [8] + [0] * (len(fake.loads) - 1)
    assert len(set(prompts)) == len(prompts)
    assert len(list(tmp_path.glob("run-*.json"))) == len(fake.loads)
    assert read_run(tmp_path / "run-1.json").settings["rate"] == "1 sessions/s"
    assert KEY not in output + page.read_text()


def test_every_run_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []

    @contextmanager
    def bar(title: str) -> Iterator[None]:
        titles.append(title)
        yield

    fake = faked(monkeypatch)
    monkeypatch.setattr(cli_find_max, "progress_bar", bar)
    with served() as server:
        code, output = command("find-max", url(server), *SEARCH)
    assert code == 0, output
    assert len(titles) == len(fake.loads)
    assert titles[0].endswith(" at 1 sessions/s")


def test_no_rate_that_holds_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    with served() as server:
        code, output = command(
            *("find-max", url(server), *SEARCH, "--start-rate", "40", "--max-runs", "2")
        )

    assert code == 1
    assert "no rate was shown to hold" in output
    assert "the search ended after 2 runs, before it was done" in output


def test_a_workload_that_ends_is_not_sent_faster_than_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = faked(monkeypatch)
    more = ("-w", "W4", "--ttft-ms", "500", "--target", "0.2", "--seed", "3", "--seconds", "3")
    with served() as server:
        too_fast = command("find-max", url(server), *more, "--start-rate", "3")
        code, output = command("find-max", url(server), *more, "--start-rate", "0.7")

    assert too_fast[0] == 2
    assert "--start-rate: there are not enough sessions for 3/s" in too_fast[1]
    assert code == 0, output
    assert {len(load.sessions) for load in fake.loads} <= {1, 2, 3}
    assert "there are not enough sessions: nothing is known of it" in output


def test_ctrl_c_ends_the_search_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = faked(monkeypatch, interrupted_at=3)
    with served() as server:
        code, output = command(
            *("find-max", url(server), *SEARCH, "--json", str(tmp_path / "run.json"))
        )

    assert code == 130
    assert output.splitlines()[-1] == "loadtest: interrupted after 2 runs"
    assert "at least 2.00 sessions/s hold" in output
    assert len(fake.loads) == 3
    assert len(list(tmp_path.glob("run-*.json"))) == 2


@pytest.mark.parametrize(
    ("tenant", "arguments", "said"),
    [
        ("arrivals: {pattern: poisson, rate: 1}, seconds: 9", (), "no tenant has a TTFT"),
        ("slo: {ttft_ms: 9}, arrivals: {pattern: poisson, rate: 1}", (), "seconds: is needed"),
        (
            "slo: {ttft_ms: 9}, arrivals: {pattern: poisson, rate: 1}, seconds: 9",
            ("--seconds", "5"),
            "--plan: has its own",
        ),
        (None, (), "--ttft-ms or --tpot-ms: a promise is needed"),
        (None, ("--ttft-ms", "9", "--arrivals", "closed"), "--rate is of no use"),
    ],
)
def test_wrong_use_ends_with_2(
    tmp_path: Path, tenant: str | None, arguments: tuple[str, ...], said: str
) -> None:
    if tenant is not None:
        plan = tmp_path / "plan.yaml"
        plan.write_text(f"seed: 1\ntenants: [{{name: a, workload: unique, {tenant}}}]\n")
        arguments = (*arguments, "--plan", str(plan))
    code, output = command("find-max", "http://h/v1", *arguments)

    assert (code, said in output) == (2, True), output
