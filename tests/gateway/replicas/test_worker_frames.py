"""Messages as bytes: nothing is lost in the coding, and nonsense is found out."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import Owner, Retention, Tier
from cache.block_events import BlockEvents, TierChange
from cache.block_pool import Share
from cache.redis_options import RedisOptions
from cache.report import BlockRun, CacheStats, CacheUse, Erased, Miss, TenantShare, TierStats
from engine.report import EngineStats, Peaks, StepReport, StepWork
from engine.request import EngineOutput, EngineRequest, FinishReason, SharedPrefix, TokenLogprobs
from engine.sampling_params import SamplingParams
from gateway.replicas.engine_facts import EngineFacts
from gateway.replicas.worker.frames import (
    MAX_FRAME_BYTES,
    BadFrame,
    FrameReader,
    from_worker,
    to_frame,
    to_worker,
)
from gateway.replicas.worker.messages import (
    Abort,
    Answer,
    Beat,
    CoreShare,
    Erase,
    Fatal,
    FromWorker,
    Open,
    Progress,
    Ready,
    SetShares,
    Shares,
    Step,
    Stop,
    Submit,
    TakeSnapshot,
    ToWorker,
)
from policies.cost import Coefficients

COST = Coefficients(*(0.1 * i for i in range(9)), step_tokens=256, block_tokens=16)
STATS = EngineStats(1, 2, 3, 4, 5, 12, 7, 8, True, 0.25, 90, 1000)
CACHE = CacheStats(
    (TierStats(Tier.DRAM, total=5, misses={Miss.EVICTED: 3}, dropped={"busy": 1}, up=False),),
    (TenantShare(b"tenant-1", 1, 2, 3),),
)
EVENTS = BlockEvents(
    1 << 60, 4, (TierChange(Tier.DEVICE, (b"a" * 16,), (b"b" * 16,)), TierChange(Tier.REDIS))
)
REQUEST = EngineRequest(
    request_id="ä request",
    prompt_token_ids=[0, 7, 130_000],
    params=SamplingParams(
        max_tokens=5,
        temperature=0.7,
        logit_bias={5: -100.0, 70_000: 2.5},
        seed=-(1 << 63),
        stop_token_ids=frozenset({2, 3}),
        prompt_logprobs=0,
    ),
    chain_root=b"\xff" * 16,
    priority=-3,
    read_cache=False,
    owner=Owner(b"t" * 8, b"s" * 8),
    shared=SharedPrefix(b"r" * 16, 32),
    retention=(Retention(16, 60.0, durable=True),),
    generated_token_ids=(9, 8),
)
OUTPUT = EngineOutput(
    request_id="r",
    token_ids=(1, 2),
    logprobs=(TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.5))),),
    cached_tokens=16,
    finish_reason=FinishReason.STOP,
    stopped_by_token=True,
    prompt_logprobs=(TokenLogprobs(3, float("-inf"), ()),),
    cache_use=CacheUse(16, 16, 0, 0, 0.1, (BlockRun(0, 1, Tier.DEVICE), BlockRun(1, 1, None))),
)
FACTS = EngineFacts(
    "native", "cpu", "float32", "ab" * 32, b"i" * 32, {"top_k": 40.0}, 512, 256, 16, 4096, 9, COST
)
MEASURED = replace(FACTS, peaks=Peaks(4.5e11, 3e10))
SHARES = Shares({b"t" * 8: Share(1, None)}, {b"t" * 8: Share(0, 4)}, {b"t" * 8: 1 << 40})
REDIS = RedisOptions(url="redis://:password@127.0.0.1:1/0", secret=b"s", encrypt=True)

TO_WORKER: list[ToWorker] = [
    Open("m/0", b"{}", REDIS, 1, 2, CoreShare((2, 3), 2), SHARES, "info"),
    Open("m/0", b"{}", None, 0, 1, CoreShare((), 2), None, "info"),
    Submit(REQUEST),
    Abort("r"),
    Erase(3, None, None),
    Erase(4, b"t" * 8, b"s" * 8),
    SetShares(5, SHARES),
    TakeSnapshot(6),
    Stop(),
]
FROM_WORKER: list[FromWorker] = [
    Progress("weights", 5, 1 << 40),
    Ready(FACTS, STATS, CACHE),
    Ready(MEASURED, STATS, CACHE),
    Step(StepReport((OUTPUT, OUTPUT), 0.1, 2, 2, STATS, EVENTS, COST)),
    Step(StepReport((), 0.0, 0, 0, STATS)),
    Step(StepReport((), 0.1, 1, 1, STATS, work=StepWork(1 << 50, 1 << 40, prefill=True))),
    Beat(None, None),
    Beat(STATS, CACHE),
    Answer(3, erased=Erased(1, 2, None)),
    Answer(6, events=EVENTS),
    Answer(7, error="no"),
    Fatal("/model: no such file"),
]


@given(st.lists(st.integers(1, 400), max_size=30))
@settings(max_examples=30, deadline=None)
def test_messages_survive_in_whatever_pieces_they_come(cuts: list[int]) -> None:
    assert _through(to_worker(), TO_WORKER, cuts) == TO_WORKER
    assert _through(from_worker(), FROM_WORKER, cuts) == FROM_WORKER


def _through(reader, messages, cuts):
    stream = b"".join(to_frame(message) for message in messages)
    got = []
    for cut in cuts:
        got += reader.feed(stream[:cut])
        stream = stream[cut:]
    return got + reader.feed(stream)


def test_one_read_may_hold_many_messages() -> None:
    reader = from_worker()
    frames = b"".join(to_frame(message) for message in FROM_WORKER)
    assert len(reader.feed(frames + frames[:3])) == len(FROM_WORKER)
    assert len(reader.feed(frames[3:])) == len(FROM_WORKER)


def test_a_token_is_as_old_as_where_it_was_made() -> None:
    report = StepReport((OUTPUT,), 0.1, 2, 2, STATS)
    (step,) = from_worker().feed(to_frame(Step(report)))
    assert isinstance(step, Step)
    assert step.report.outputs[0].made_s == OUTPUT.made_s


@given(st.binary(min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_nonsense_is_found_out_or_is_a_message(body: bytes) -> None:
    for reader in (to_worker(), from_worker()):
        problem, messages = _problem_of(reader, len(body).to_bytes(4, "little") + body)
        assert (problem is None) == (len(messages) == 1)
        if problem is not None:
            assert str(len(body)) in str(problem)
            assert problem.__context__ is None  # it could quote what came


def _problem_of(reader, frame):
    try:
        return None, reader.feed(frame)
    except BadFrame as problem:
        return problem, []


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x93\xa5abort", msgspec.msgpack.encode(["abort", 5])]
)
def test_what_is_no_message_ends_it(body: bytes) -> None:
    with pytest.raises(BadFrame):
        to_worker().feed(len(body).to_bytes(4, "little") + body)


def test_messages_of_the_other_direction_are_none_of_ours() -> None:
    with pytest.raises(BadFrame):
        to_worker().feed(bytes(to_frame(Fatal("x"))))
    with pytest.raises(BadFrame):
        from_worker().feed(bytes(to_frame(Stop())))


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_is_waited_for() -> None:
    with pytest.raises(BadFrame, match="claims"):
        from_worker().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_a_message_longer_than_a_frame_is_refused_where_it_is_made(monkeypatch) -> None:
    monkeypatch.setattr("gateway.replicas.worker.frames.MAX_FRAME_BYTES", 100)
    with pytest.raises(BadFrame):
        to_frame(Fatal("x" * 101))
    reader: FrameReader[FromWorker] = from_worker()
    assert reader.feed(bytes(to_frame(Fatal("x" * 80)))) == [Fatal("x" * 80)]


def test_secrets_do_not_show_in_a_message_s_text() -> None:
    assert "password" not in repr(TO_WORKER[0])
