"""The measurement itself: it tells all rates."""

import json

from cache.bench_directory import main

SMALL = ["--blocks", "3000", "--replicas", "8", "--prompt-tokens", "2048", "--lookups", "10"]


def test_every_rate_is_told(capsys):
    assert main([*SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["blocks"] >= 3000
    assert 50e6 < found["estimated_bytes"] < 500e6
    for kind in ("cold", "system_prompt", "half_warm_on_few", "warm_on_all", "own_end_each"):
        assert 0 < found[kind]["p50_us"] <= found[kind]["p99_us"]
    assert found["events_per_s"] > 0


def test_the_table_has_a_line_for_each_rate(capsys):
    assert main(SMALL) == 0
    assert len(capsys.readouterr().out.splitlines()) == 15
