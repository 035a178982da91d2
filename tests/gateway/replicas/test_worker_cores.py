"""Who computes where."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.replicas.worker.cores import Core, share_cores, usable_cores
from gateway.replicas.worker.messages import CoreShare


def machine(cores: int, threads: int = 1) -> list[Core]:
    """Cores whose hardware threads are numbered as Linux does: the second ones come last."""
    return [tuple(core + cores * thread for thread in range(threads)) for core in range(cores)]


def test_what_the_gateway_leaves_is_dealt_out_whole() -> None:
    assert share_cores([None, None], machine(8)) == (
        CoreShare((1, 2, 3, 4), 4),
        CoreShare((5, 6, 7), 3),
    )
    assert share_cores([None], machine(4, threads=2)) == (CoreShare((1, 5, 2, 6, 3, 7), 3),)


def test_who_asks_for_threads_gets_them_first() -> None:
    assert share_cores([None, 2], machine(8)) == (
        CoreShare((1, 2, 3, 4, 5), 5),
        CoreShare((6, 7), 2),
    )


@pytest.mark.parametrize(
    ("asked", "cores", "threads"),
    [
        ([None], 1, [1]),
        ([None], 2, [2]),
        ([None, None], 2, [1, 1]),
        ([None] * 4, 4, [1] * 4),
        ([8, None], 4, [8, 2]),
    ],
)
def test_where_cores_are_few_nobody_is_bound(asked, cores, threads) -> None:
    assert share_cores(asked, machine(cores)) == tuple(CoreShare((), each) for each in threads)


@given(st.lists(st.none() | st.integers(1, 8), min_size=1, max_size=9), st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_no_core_has_two_owners(asked: list[int | None], cores: int) -> None:
    shares = share_cores(asked, machine(cores, threads=2))
    assert len(shares) == len(asked)
    bound = [cpu for share in shares for cpu in share.cpus]
    assert len(bound) == len(set(bound))
    assert 0 not in bound
    for share, wanted in zip(shares, asked, strict=True):
        assert share.threads == wanted if wanted is not None else share.threads >= 1
        assert len(share.cpus) in (0, 2 * share.threads)
    if bound:
        assert all(share.cpus for share in shares)
        spread = [s.threads for s, wanted in zip(shares, asked, strict=True) if wanted is None]
        assert not spread or max(spread) - min(spread) <= 1
        assert not spread or len(bound) == 2 * (cores - 1)


def test_nobody_needs_nothing() -> None:
    assert share_cores([], machine(8)) == ()


def test_the_machine_s_own_cores_are_those_that_may_be_used() -> None:
    cpus = [cpu for core in usable_cores() for cpu in core]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))
