"""`loadtest workloads` and `loadtest trace`."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.workloads.registry import WORKLOADS
from tests.loadtest.cli.serving import command


def test_all_workloads_are_shown() -> None:
    code, output = command("workloads")

    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == list(WORKLOADS)


def test_a_workload_is_shown_with_its_parameters() -> None:
    code, output = command("workloads", "rag")

    assert code == 0
    assert "  documents  how many documents there are (default 16)\n" in output
    assert "they take turns (unset)\n" in output
    assert (
        "  file  JSONL with messages or a prompt on each line (needed)\n"
        in command("workloads", "chats")[1]
    )


def test_a_recording_is_described() -> None:
    code, output = command("trace", "mooncake")

    assert code == 0
    assert "requests in" in output
    assert "one endless cache" in output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "is empty"),
        ("{}\n", ":1: prompt_tokens: is missing"),
        ('{"a":"' + "x" * 140_000, ":1: is neither a JSON object nor a header"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,9" + "9" * 5000 + ",1\n", ":2: Cont"),
    ],
)
def test_what_is_no_recording_ends_with_2_and_is_named(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    code, output = command("trace", str(file))

    assert code == 2
    assert output.startswith(f"loadtest: {file}")
    assert said in output


def test_wrong_use_ends_with_2() -> None:
    assert command("workloads", "none")[0] == 2
    assert command("trace", "mooncake", "--format", "xml") == (
        2,
        "loadtest: no format xml; there are auto, mooncake, azure, own\n",
    )
