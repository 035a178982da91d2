"""How many connections may be open."""

from __future__ import annotations

import resource

import pytest

from loadtest.live.descriptors import raise_descriptor_limit


@pytest.mark.parametrize(("soft", "raised"), [(256, [(4096, 4096)]), (4096, [])])
@pytest.mark.parametrize("refused", [None, ValueError("not allowed"), OSError("no")])
def test_the_limit_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    raised: list[tuple[int, int]],
    refused: Exception | None,
) -> None:
    asked: list[tuple[int, int]] = []

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        asked.append(limits)
        if refused is not None:
            raise refused

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 4096))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    raise_descriptor_limit()

    assert asked == raised
