"""What a gateway has put on a replica: taken back once, in whatever order things end."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dispatch.load import Load
from policies.answer_lengths import AnswerLengths
from policies.routing import Queued, Standing
from policies.work_by_priority import MOST_FLOWS, REST

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "begin", "answer", "end", "leave"]),
        st.integers(0, 9),
        st.integers(0, 2),
        st.sampled_from([b"", b"acme", b"beta"]),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_load_is_the_sum_of_what_is_there(steps: list[tuple[str, int, int, bytes]]) -> None:
    load = Load(4, capacity=6, clock=lambda: 7.0)
    scopes = []
    brought: Counter[tuple[int, bytes]] = Counter()
    waiting: dict[int, tuple[int, int, int, bytes]] = {}
    running: dict[int, tuple[int, int]] = {}
    answers: dict[int, int] = {}
    expected = AnswerLengths()
    for step, number, priority, flow in steps:
        if step == "add":
            scope = ExitStack()
            share = scope.enter_context(load.share(number, 10 * number, priority, flow, 2.0))
            waiting[len(scopes)] = (number, 10 * number, priority, flow)
            brought[priority, flow] += number
            scopes.append((scope, share))
        elif scopes:
            index = number % len(scopes)
            scope, share = scopes[index]
            if step == "begin":
                share.begin()
                if index in waiting:
                    _, context, its_priority, _ = waiting.pop(index)
                    running[index] = (context, its_priority)
            elif step == "answer":
                share.answered(number)
                if index in waiting or index in running:
                    answers[index] = number
            else:
                share.end() if step == "end" else scope.close()
                waiting.pop(index, None)
                running.pop(index, None)
                if answers.get(index):
                    expected.add(answers.pop(index))
        standing = load.standing()
        queued: dict[tuple[int, bytes], list[int]] = {}
        for tokens, _, own, its_flow in waiting.values():
            queued.setdefault((own, its_flow), []).append(tokens)
        yielding = Counter(own for _, own in running.values() if own > 0)
        assert standing == Standing(
            pending_tokens=sum(tokens for tokens, _, _, _ in waiting.values()),
            waiting=len(waiting),
            running=len(running),
            context_tokens=sum(context for context, _ in running.values()),
            max_running=4,
            full=len(waiting) + len(running) >= 6,
            queued=tuple(
                Queued(own, len(found), sum(found), its_flow, 2.0, brought[own, its_flow] / 10)
                for (own, its_flow), found in sorted(queued.items())
            ),
            answer_tokens=expected.tokens,
            yielding=tuple(sorted(yielding.items())),
        )
        assert load.standing() is standing
    for scope, _ in scopes:
        scope.close()
    assert load.own() == Standing(max_running=4)
    assert (load.standing().queued, load.standing().yielding) == ((), ())


def test_what_other_gateways_have_put_there_counts_for_everybody_else() -> None:
    load = Load(4, capacity=3)
    load.set_foreign(Standing(pending_tokens=100, waiting=1, running=1, context_tokens=50))
    with load.share(7, 20):
        # of the others' nothing is known that could be overtaken
        queued = (Queued(0, 1, 7, tokens_per_s=0.7),)
        assert load.standing() == Standing(107, 2, 1, 50, 4, full=True, queued=queued)
        assert load.own() == Standing(7, 1, 0, 0, 4)
    assert not load.standing().full


def test_a_standing_is_made_again_only_when_something_has_changed() -> None:
    load = Load(4, capacity=None)
    before = load.standing()
    load.note_pages(5, 100)
    load.set_foreign(Standing())
    assert load.standing() is before
    with load.share(1, 1):
        assert load.standing() is not before
    assert load.standing() == before


def test_who_is_less_urgent_finds_it_full_earlier() -> None:
    load = Load(2, capacity=10)
    with ExitStack() as scope:
        for _ in range(6):
            scope.enter_context(load.share(1, 1))
        assert [load.standing(priority).full for priority in (0, 1, 2, 9)] == [
            False,
            False,
            True,
            True,
        ]
        assert load.standing(2) is load.standing(3)
        assert load.standing(2)._replace(full=False) == load.standing()
        for _ in range(4):
            scope.enter_context(load.share(1, 1))
        assert load.standing(2) == load.standing(0)
        assert load.standing().full


def test_no_place_in_line_leaves_a_place_to_run_to_everybody() -> None:
    load = Load(2, capacity=2)
    with load.share(1, 1):
        assert not load.standing(2).full
        with load.share(1, 1):
            assert load.standing(0).full


def test_of_many_flows_the_smallest_are_taken_together() -> None:
    load = Load(4, capacity=None, clock=lambda: 7.0)
    with ExitStack() as scope:
        for number in range(100):
            for priority in (0, 1):
                flow = b"flow %d" % number
                scope.enter_context(load.share(number, number, priority, flow, 0.5))
        queued = load.standing().queued
        assert len(queued) == MOST_FLOWS + 2
        assert sum(each.tokens for each in queued) == load.standing().pending_tokens
        assert sum(each.sequences for each in queued) == 200
        assert {each.tokens for each in queued[:MOST_FLOWS]} == set(range(68, 100))
        assert queued[MOST_FLOWS:] == tuple(
            Queued(priority, 68, sum(range(68)), REST, 34.0, pytest.approx(sum(range(68)) / 10))
            for priority in (0, 1)
        )


def test_a_flow_weighs_what_its_last_request_said() -> None:
    load = Load(4, capacity=None, clock=lambda: 7.0)
    with load.share(5, 5, 1, b"acme", 2.0):
        with load.share(6, 6, 1, b"acme", 3.0):
            assert load.standing().queued == (Queued(1, 2, 11, b"acme", 3.0, 1.1),)
        assert load.standing().queued == (Queued(1, 1, 5, b"acme", 3.0, 1.1),)


def test_what_a_flow_has_brought_lately_is_told_while_it_waits() -> None:
    now_s = 0.0
    load = Load(4, capacity=None, clock=lambda: now_s)
    for _ in range(200):
        with load.share(20, 20, 1, b"acme"):
            assert load.standing().queued[0].tokens_per_s > 0
        now_s += 0.5
    with load.share(20, 20, 1, b"acme"):
        assert load.standing().queued[0].tokens_per_s == pytest.approx(40, rel=0.05)
    assert load.standing().queued == ()
    now_s += 60.0
    with load.share(20, 20, 1, b"acme"):
        assert load.standing().queued[0].tokens_per_s == pytest.approx(2, rel=0.1)


def test_nothing_is_pushed_out_of_a_cache_that_has_room() -> None:
    load = Load(4, capacity=None)
    assert load.standing().reuse == 1.0  # nobody has said anything yet
    load.note_pages(100, 100)
    assert load.standing().reuse == 0.0
    load.note_pages(12, 100)
    assert load.standing().reuse == 1.0
    load.note_pages(13, 100)
    assert load.standing().reuse == 0.0


def test_answers_are_as_long_as_those_that_ended_here_or_else_at_the_others() -> None:
    here, there, alone = (Load(4, capacity=None) for _ in range(3))
    model = AnswerLengths()
    here.learn_with(model)
    there.learn_with(model)
    assert there.standing().answer_tokens == 0
    for tokens in (10, 20):
        with here.share(1, 1) as share:
            share.begin()
            share.answered(tokens)
    assert (here.standing().answer_tokens, there.standing().answer_tokens) == (15, 15)
    with there.share(1, 1) as share:
        share.answered(90)
    with there.share(1, 1):
        pass  # its client left before the first token: that tells nothing
    assert (here.standing().answer_tokens, there.standing().answer_tokens) == (15, 90)
    assert model.tokens == 40
    assert alone.standing().answer_tokens == 0


def test_long_ago_answers_are_forgotten() -> None:
    answers = AnswerLengths()
    for _ in range(100):
        answers.add(1000)
    for _ in range(300):
        answers.add(10)
    assert 10 <= answers.tokens <= 13


async def test_whoever_waits_for_the_last_one_to_go_is_woken() -> None:
    load = Load(4, capacity=None)
    await asyncio.wait_for(load.wait_empty(), 1)
    with load.share(1, 1) as share:
        waiting = asyncio.ensure_future(load.wait_empty())
        await asyncio.sleep(0)
        share.begin()
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
