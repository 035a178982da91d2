"""Work of a less urgent priority, such as warming a prefix, delays nobody's prefill."""

from __future__ import annotations

from tests.engine.tier_stage import TierStage

WARMING = 9


def prompt(seed: int, length: int) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


def tokens_by_name(stage: TierStage) -> dict[str, int]:
    """What one step computes of whom, in its order."""
    return {chunk.sequence.request.request_id: chunk.tokens for chunk in stage.step()}


def test_a_prefill_comes_before_the_rest_of_a_less_urgent_one():
    stage = TierStage(pages=32, step_tokens=64, redis=False)
    stage.submit("warm", prompt(1, 190), priority=WARMING)
    assert tokens_by_name(stage) == {"warm": 64}
    stage.submit("asked", prompt(2, 100), max_tokens=2)
    assert tokens_by_name(stage) == {"asked": 64}
    assert tokens_by_name(stage) == {"asked": 36, "warm": 28}
    assert tokens_by_name(stage) == {"asked": 1, "warm": 63}
    stage.finish()
    assert stage.scheduler.preemptions == 0
    stage.check()


def test_a_less_urgent_stream_goes_on_beside_a_prefill():
    stage = TierStage(pages=32, step_tokens=64, redis=False)
    stage.submit("patient", prompt(1, 20), max_tokens=9, priority=WARMING)
    stage.step()
    stage.submit("asked", prompt(2, 190))
    assert tokens_by_name(stage) == {"asked": 63, "patient": 1}
    assert tokens_by_name(stage) == {"asked": 63, "patient": 1}
    stage.finish()
    stage.check()


def test_a_slot_is_given_up_for_who_is_more_urgent():
    stage = TierStage(pages=32, max_running=2, step_tokens=64, redis=False)
    for name in "12":
        stage.submit(name, prompt(int(name), 90), max_tokens=20, priority=WARMING)
        stage.step()
    stage.submit("asked", prompt(3, 60))
    assert tokens_by_name(stage)["asked"] == 60
    assert [each.request.request_id for each in stage.scheduler.waiting] == ["2"]
    assert stage.scheduler.preemptions == 1
    stage.finish()
    assert sorted(stage.done) == ["1", "2", "asked"]
    stage.check()


def test_pages_are_given_up_for_who_is_more_urgent_and_nothing_is_lost():
    stage = TierStage(pages=12, step_tokens=160, redis=False)
    stage.submit("warm", prompt(1, 150), max_tokens=30, priority=WARMING)
    stage.step()  # holds ten of twelve pages
    stage.submit("asked", prompt(2, 100))
    assert tokens_by_name(stage) == {"asked": 100}
    stage.finish()
    assert stage.scheduler.preemptions == 1
    stage.check()


def test_nobody_gives_way_to_an_equal():
    stage = TierStage(pages=32, max_running=1, step_tokens=64, redis=False)
    stage.submit("1", prompt(1, 90))
    stage.step()
    stage.submit("2", prompt(2, 10))
    assert tokens_by_name(stage) == {"1": 26}
    stage.finish()
    assert stage.scheduler.preemptions == 0


def test_who_computes_what_an_urgent_one_waits_for_is_as_urgent():
    stage = TierStage(pages=48, max_running=4, step_tokens=64, redis=False)
    stage.submit("warm", prompt(1, 130), priority=WARMING)
    stage.step()
    stage.submit("other", prompt(2, 190), priority=WARMING - 1)
    stage.submit("asked", [*prompt(1, 128), 7, 7])
    stage.step()  # it learns for whom it has to wait
    assert tokens_by_name(stage)["warm"] == 64
    assert tokens_by_name(stage)["asked"] == 2
    assert stage.sequences["other"].computed < 190
    stage.finish()
    assert stage.done["asked"].cached_tokens == 128
    stage.check()


def test_what_waits_is_counted_until_it_runs():
    """The stage compares the counts with the sequences' own whenever it checks."""
    stage = TierStage(pages=32, max_running=1, step_tokens=64, redis=False)
    load = stage.scheduler.load
    stage.submit("1", prompt(1, 100), max_tokens=3)
    assert load() == (100, 0)
    stage.step()
    assert load() == (36, 64)
    stage.submit("same", prompt(1, 110))  # 64 of it are there, 32 are being computed
    stage.submit("other", prompt(2, 50))
    assert load() == (36 + 14 + 50, 64)
    stage.step()
    assert load() == (14 + 50, 100)
    stage.step()
    assert load() == (14 + 50, 101)
    stage.abort("other")
    assert load() == (14, 101)
    stage.finish()
    assert load() == (0, 0)
    stage.check()
