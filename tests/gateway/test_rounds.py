"""Everybody is called as often as they want, by one timer, until they leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from gateway.rounds import Rounds
from tests.gateway.stage import eventually


class Attending:
    """Counts how often each name was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._of: dict[str, Callable[[], None]] = {}

    def __call__(self, name: str) -> Callable[[], None]:
        def attend() -> None:
            self.calls[name] += 1

        return self._of.setdefault(name, attend)


async def test_whoever_joins_is_called_until_they_leave():
    rounds, at = Rounds(), Attending()
    rounds.join(at("slow"), 30.0)
    rounds.join(at("quick"), 0.005)
    await eventually(lambda: at.calls["quick"] >= 3)
    assert at.calls["slow"] == at.calls["quick"]  # more often than it wants does no harm
    rounds.leave(at("quick"))
    rounds.leave(at("quick"))
    before = at.calls.copy()
    rounds.join(at("other"), 0.005)
    await eventually(lambda: at.calls["other"] >= 2)
    assert at.calls["quick"] == before["quick"]
    rounds.stop()


async def test_rounds_that_linger_keep_their_timer_and_others_do_not():
    loop = asyncio.get_running_loop()
    started: list[asyncio.TimerHandle] = []
    call_at = loop.call_at

    def counted(*args: object, **kwargs: object) -> asyncio.TimerHandle:
        handle = call_at(*args, **kwargs)
        started.append(handle)
        return handle

    loop.call_at = counted  # type: ignore[method-assign]  # the loop is this test's own
    at = Attending()
    for rounds, timers in ((Rounds(linger=True), 1), (Rounds(), 3)):
        started.clear()
        for name in "abc":
            rounds.join(at(name), 30.0)
            rounds.leave(at(name))
        assert len(started) == timers
        rounds.stop()
        assert all(handle.cancelled() for handle in started)


async def test_who_is_sent_away_in_a_round_is_not_called_in_it_and_a_failure_ends_nothing():
    rounds, at = Rounds(), Attending()
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))

    def sends_away() -> None:
        rounds.leave(at("one"))
        raise KeyError("no")

    rounds.join(sends_away, 0.005)
    rounds.join(at("one"), 0.005)
    await eventually(lambda: len(failures) >= 2)
    assert not at.calls
    rounds.stop()
