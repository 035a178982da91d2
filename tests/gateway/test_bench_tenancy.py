"""The bench of what limits and promises take runs, and says what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.bench_tenancy import main
from tests.cache.valkey import running_valkey


def test_every_part_is_timed_and_none_is_larger_than_all(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with running_valkey(tmp_path) as valkey:
        assert main(["--requests", "100", "--json", "--redis", valkey.url]) == 0
    found = json.loads(capsys.readouterr().out)
    *parts, together, writing, shared = found.items()
    assert (together[0], writing[0].split()[0], len(parts)) == ("together", "writing", 8)
    assert "Redis" in shared[0]
    assert all(0 < each["p50_us"] <= each["p99_us"] for each in found.values())
    assert max(each["p50_us"] for _, each in parts) < together[1]["p50_us"]
