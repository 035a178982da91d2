from __future__ import annotations

from random import Random

from loadtest.simulate.job import SimJob
from loadtest.simulate.streams import StreamSet
from loadtest.trace import TraceRequest

SIZE = 8


def job(index: int, prompt_tokens: int, answer_tokens: int, tpot_s: float | None = None) -> SimJob:
    """One with its first token."""
    request = TraceRequest(0.0, prompt_tokens, answer_tokens)
    made = SimJob(index, request, 0, priority=0, flow=b"", weight=1.0, ttft_s=None, tpot_s=tpot_s)
    made.generated, made.known = 1, prompt_tokens + 1
    return made


def test_pages_and_contexts_are_those_of_every_token() -> None:
    random = Random(9)
    for _ in range(30):
        streams = StreamSet(SIZE)
        known: dict[SimJob, int] = {}
        ends: dict[SimJob, int] = {}
        for index in range(random.randint(1, 6)):
            each = job(index, random.randint(1, 40), random.randint(2, 50))
            streams.join(each)
            known[each], ends[each] = each.known, each.answer_tokens - 1
        while streams.count:
            assert streams.steps_left() == min(ends.values())
            steps = random.randint(1, streams.steps_left())
            first = random.randint(1, steps)
            pages = 0
            for step in range(1, steps + 1):
                if step >= first:
                    # a token is the first of a block if those before it fill whole ones
                    pages += sum((tokens - 1) % SIZE == 0 for tokens in known.values())
                known = {each: tokens + 1 for each, tokens in known.items()}
            assert streams.pages(first, steps - first + 1) == pages
            ended = streams.advance(steps)
            assert streams.context_tokens == sum(known.values())
            ends = {each: left - steps for each, left in ends.items()}
            assert set(ended) == {each for each, left in ends.items() if not left}
            for each in ended:
                assert streams.leave(each) == each.answer_tokens - 1
                assert each.known == known.pop(each)
                del ends[each]
        streams.check_empty()


def test_who_leaves_early_ends_nothing_later() -> None:
    streams = StreamSet(SIZE)
    first, second = job(0, 10, 5), job(1, 10, 9)
    streams.join(first)
    streams.join(second)
    assert streams.advance(2) == []
    assert streams.leave(first) == 2
    assert (first.known, first.generated) == (13, 3)
    assert streams.steps_left() == 6
    streams.join(first)
    assert streams.advance(2) == [first]


def test_the_tightest_target_counts_for_as_long_as_it_is_there() -> None:
    streams = StreamSet(SIZE)
    jobs = [job(0, 10, 5), job(1, 10, 5, 0.2), job(2, 10, 5, 0.1), job(3, 10, 5, 0.1)]
    for each in jobs:
        streams.join(each)
    assert streams.as_one()[:3] == (4, 44, 0.1)
    streams.leave(jobs[2])
    assert streams.as_one().due_s == 0.1
    streams.leave(jobs[3])
    assert streams.as_one().due_s == 0.2
    streams.leave(jobs[1])
    assert streams.as_one().due_s is None
