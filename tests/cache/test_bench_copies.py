"""The measurement itself: it moves real blocks, tells all rates, and fails in one line."""

import json

import pytest
import torch

from cache.bench_copies import main
from tests.cache.valkey import running_valkey

SMALL = ["--blocks", "8", "--redis-blocks", "8", "--block-bytes", "4096", "--repeats", "1"]


def test_every_rate_is_told(tmp_path, capsys):
    with running_valkey(tmp_path) as server:
        assert main([*SMALL, "--json", "--redis", server.url]) == 0
        with server.client() as client:
            assert client.keys("*") == []
    found = json.loads(capsys.readouterr().out)
    assert all(rate > 0 for rate in found["copies"].values())
    (over_unix,) = found["redis"]
    assert over_unix.pop("location") == server.url
    assert set(over_unix) == {"plain_read", "plain_write", "tier_read", "tier_write"}
    assert all(rate > 0 for rate in over_unix.values())


def test_the_table_has_a_line_for_each_rate(capsys):
    assert main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("cpu ") and line.endswith(" GB/s") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--redis", "http://h"], "url: must begin with"),
        (["--redis", "unix:///nowhere/s.sock"], "connecting to /nowhere/s.sock"),
        pytest.param(
            ["--device", "cuda"],
            "there is no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, said, capsys):
    assert main([*SMALL, *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert said in output.err
