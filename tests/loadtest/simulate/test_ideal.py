from __future__ import annotations

from loadtest.simulate.ideal import ideal_hit_rate
from loadtest.trace import Trace, TraceRequest


def test_of_ten_blocks_five_were_there_before() -> None:
    prompts: list[list[int]] = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4], []]
    requests = [TraceRequest(at, 40, 1, blocks) for at, blocks in enumerate(prompts)]
    assert ideal_hit_rate(Trace("worked", 16, requests)) == 5 / 10


def test_a_gap_ends_what_is_found() -> None:
    requests = [TraceRequest(0, 40, 1, (1, 2, 3)), TraceRequest(1, 40, 1, (1, 9, 3))]
    assert ideal_hit_rate(Trace("gap", 16, requests)) == 1 / 6


def test_without_blocks_there_is_nothing_to_find() -> None:
    assert ideal_hit_rate(Trace("none", 16, [TraceRequest(0, 40, 1)])) == 0.0


def test_ids_of_any_size_are_told_apart() -> None:
    far = 1 << 60
    prompts = ([1, far], [1, far, 5], [1, 5], [far + 1], [-3, 1], [-3, 1])
    requests = [TraceRequest(at, 40, 1, blocks) for at, blocks in enumerate(prompts)]
    # of the third prompt all is found, by ids: it is for traces to give an id to one chain only
    assert ideal_hit_rate(Trace("far", 16, requests)) == (0 + 2 + 2 + 0 + 0 + 2) / 12
