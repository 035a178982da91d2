"""From options to a load: what a warm-up is made of, and the command line to give again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadtest.cli.wanted import Pace, Wanted, this_command, wanted
from policies.slo import NO_SLO


def of(*settings: str, workload: str = "unique", warm_up: int = 8) -> Wanted:
    return wanted(
        *(workload, settings, None, Pace(), NO_SLO), seed=5, vocabulary=48_000, warm_up=warm_up
    )


def test_a_warm_up_shares_no_prompt_with_what_is_measured() -> None:
    what = of("prompt_tokens=20")
    warm = {tuple(session.turns[0].tokens or ()) for session in what.warm_up_sessions()}

    assert len(warm) == 8
    assert not warm & {tuple(session.turns[0].tokens or ()) for session in what.load().sessions}
    assert of(warm_up=0).warm_up_sessions() == ()


def test_recorded_texts_do_not_warm_the_cache_for_themselves(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"at_s": 0, "prompt": "hello", "output_tokens": 4}\n')
    warm = of(f"file={file}", workload="chats", warm_up=2).warm_up_sessions()
    said = [message["content"] for each in warm for message in each.turns[0].messages]

    assert len(said) == 2
    assert "hello" not in said


@pytest.mark.parametrize(
    ("given", "again"),
    [
        (["loadtest", "run", "--key", "sk-1", "u"], "forebay loadtest run u --seed 9"),
        (["run", "--key=sk-1", "--seed=3"], "forebay loadtest run --seed=3"),
        (["run", "-w", "a b"], "forebay loadtest run -w 'a b' --seed 9"),
    ],
)
def test_the_command_is_said_without_its_key_and_with_its_seed(
    given: list[str], again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["forebay", *given])

    assert this_command(9) == again
