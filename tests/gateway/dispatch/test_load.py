"""What a gateway has put on a replica: taken back once, in whatever order things end."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dispatch.load import Load
from policies.routing import Standing

steps = st.lists(
    st.tuples(st.sampled_from(["add", "begin", "end", "leave"]), st.integers(0, 9)), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_load_is_the_sum_of_what_is_there(steps: list[tuple[str, int]]) -> None:
    load = Load(4, capacity=6)
    scopes = []
    waiting: dict[int, tuple[int, int]] = {}
    running: dict[int, int] = {}
    for step, number in steps:
        if step == "add":
            scope = ExitStack()
            share = scope.enter_context(load.share(number, 10 * number))
            waiting[len(scopes)] = (number, 10 * number)
            scopes.append((scope, share))
        elif scopes:
            index = number % len(scopes)
            scope, share = scopes[index]
            if step == "begin":
                share.begin()
                if index in waiting:
                    running[index] = waiting.pop(index)[1]
            else:
                share.end() if step == "end" else scope.close()
                waiting.pop(index, None)
                running.pop(index, None)
        standing = load.standing()
        assert standing == Standing(
            pending_tokens=sum(tokens for tokens, _ in waiting.values()),
            waiting=len(waiting),
            running=len(running),
            context_tokens=sum(running.values()),
            max_running=4,
            full=len(waiting) + len(running) >= 6,
        )
    for scope, _ in scopes:
        scope.close()
    assert load.own() == Standing(max_running=4)


def test_what_other_gateways_have_put_there_counts_for_everybody_else() -> None:
    load = Load(4, capacity=3)
    load.set_foreign(Standing(pending_tokens=100, waiting=1, running=1, context_tokens=50))
    with load.share(7, 20):
        assert load.standing() == Standing(107, 2, 1, 50, 4, full=True)
        assert load.own() == Standing(7, 1, 0, 0, 4)
    assert not load.standing().full


async def test_whoever_waits_for_the_last_one_to_go_is_woken() -> None:
    load = Load(4, capacity=None)
    await asyncio.wait_for(load.wait_empty(), 1)
    with load.share(1, 1):
        waiting = asyncio.ensure_future(load.wait_empty())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
