"""How many files may be open."""

from __future__ import annotations

import resource

import pytest

from gateway.open_files import ENOUGH, raise_limit


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """This process's limits, soft and hard, as the system would have them."""
    now = [(1024, 524_288)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.append(limits))
    return now


@pytest.mark.parametrize(
    ("soft", "hard", "then", "few"),
    [
        (1024, 524_288, ENOUGH, None),
        (1024, resource.RLIM_INFINITY, ENOUGH, None),
        (1024, 20_000, 20_000, None),
        (1024, 1024, 1024, 1024),
        (256, 2048, 2048, 2048),
        (ENOUGH + 1, 524_288, ENOUGH + 1, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_as_many_as_the_system_lets_it(
    limits: list[tuple[int, int]], soft: int, hard: int, then: int, few: int | None
) -> None:
    limits[0] = (soft, hard)
    assert raise_limit() == few
    assert limits[-1] == (then, hard)


def test_a_system_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_limit() == 256
