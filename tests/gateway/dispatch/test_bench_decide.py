"""The bench of whole decisions, in small."""

from __future__ import annotations

import json

import pytest

from gateway.dispatch.bench_decide import main


def test_it_prints_every_kind_of_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--blocks", "2000", "--replicas", "4", "--prompt-tokens", "2048", "--decisions", "20")
    assert main(["--json", *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["blocks"] >= 2000
    assert found["replicas"] == 4
    for kind in ("hashing", "cold", "system_prompt", "warm_on_few", "own_end_each"):
        assert 0 < found[kind]["p50_us"] <= found[kind]["p99_us"]

    assert main(small) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["blocks", f"{found['blocks']:,}"]
    assert lines[3].split()[:2] == ["hashing", "p50"]
