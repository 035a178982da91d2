"""A whole run against a server that behaves as each test wants it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from loadtest.live.client import LiveOutcome, run_load
from loadtest.live.pool import Pool
from loadtest.live.progress import Progress
from loadtest.live.stream import StreamReader
from loadtest.live.watch import Watch
from loadtest.plan import Load, Session, Turn
from loadtest.record import Outcome, Tiers
from loadtest.wire.connection import Endpoint
from tests.loadtest.fake_server import (
    Call,
    Reply,
    answer_well,
    fake_server,
    token_event,
    usage_event,
)
from tests.loadtest.live.conversations import (
    DONE,
    answer_chat,
    completion,
    said,
    target_at,
)

Act = Callable[[Call, Reply], Awaitable[None]]


async def outcome_of(behave: Act, load: Load, timeout_s: float = 5.0, **more: Any) -> LiveOutcome:
    async with fake_server(behave, key="sk-secret") as server:
        return await run_load(target_at(server.endpoint, timeout_s), load, **more)


def closed(*sessions: Session, concurrency: int = 1) -> Load:
    return Load("test", sessions, concurrency=concurrency)


async def test_a_record_says_when_what_came_and_what_it_took() -> None:
    async def priced(call: Call, reply: Reply) -> None:
        assert call.headers["x-forebay-price"] == "include"
        assert call.headers["x-forebay-cached-tiers"] == "include"
        await reply.head(transfer_encoding="chunked", x_forebay_replica="m/0")
        await reply.event(token_event("a"))
        await reply.event(token_event("b", "length"))
        usage = usage_event(3, 2, 1)
        usage["usage"]["cost_usd"] = "0.000012"
        by_tier = {"device": 0, "dram": 1, "redis": 0}
        usage["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] = by_tier
        await reply.event(usage)
        await reply.event(DONE)
        await reply.chunk(b"")

    outcome = await outcome_of(priced, closed(completion(label="cold")))
    (record,) = outcome.records

    assert record.outcome is Outcome.OK
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 2, 1)
    assert (record.label, record.replica, record.price_nusd) == ("cold", "m/0", 12_000)
    assert record.tiers == Tiers(device=0, dram=1, redis=0)
    assert record.first_s is not None
    assert record.last_s is not None
    assert 0 <= record.due_s <= record.sent_s <= record.first_s <= record.last_s <= record.ended_s
    assert record.publish_s == record.first_s
    assert len(record.gaps_s) == 1
    assert outcome.wall_s == pytest.approx(record.e2e_s)
    assert (outcome.notes, outcome.interrupted, outcome.timeline) == ((), False, ())
    assert outcome.client.most_open == 1


async def refuse(reply: Reply, status: int, **headers: str) -> None:
    await reply.whole(
        status, b'{"error": {"message": "The key sk-secret\\nhas no room."}}', **headers
    )


async def test_every_outcome_is_told_from_the_others() -> None:
    async def varied(call: Call, reply: Reply) -> None:
        match call.body["prompt"][0]:
            case 0:
                await answer_well(call, reply)
            case 1:
                await refuse(reply, 429, retry_after="1")
            case 2:
                await refuse(reply, 503)
            case 3:
                await refuse(reply, 401)
            case 4:
                await asyncio.sleep(30)
            case 5:
                await reply.head(transfer_encoding="chunked")
                await reply.event(token_event("a"))
                reply.writer.close()
            case 6:
                await answer_well(Call("", "", {}, call.body | {"max_tokens": 1}), reply)
            case 7:
                reply.writer.close()

    sessions = [completion((place, 1, 2)) for place in range(8)]
    outcome = await outcome_of(varied, closed(*sessions, concurrency=4), timeout_s=0.4)

    assert [record.outcome for record in outcome.records] == [
        Outcome.OK,
        Outcome.LIMITED,
        Outcome.OVERLOADED,
        Outcome.REFUSED,
        Outcome.TIMED_OUT,
        Outcome.BROKEN,
        Outcome.WRONG,
        Outcome.BROKEN,
    ]
    assert [record.index for record in outcome.records] == list(range(8))
    reasons = [record.reason or "" for record in outcome.records]
    assert reasons[3] == "status 401: The key [key] has no room."
    assert not any("sk-secret" in reason or "\n" in reason for reason in reasons)
    cut = outcome.records[5]
    assert cut.first_s is not None
    assert cut.prompt_tokens == 3
    assert outcome.notes == ("answers of 429 or 503 without Retry-After: 1",)


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = Endpoint("127.0.0.1", unused.getsockname()[1], "/v1")
        for load in (closed(completion()), Load("open", [completion()])):
            (record,) = (await run_load(target_at(nobody), load)).records

            assert record.outcome is Outcome.UNREACHABLE
            assert record.reason is not None
            assert "cannot connect" in record.reason


async def test_a_client_without_sockets_blames_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def out_of_files(*_: object, **__: object) -> Any:
        raise OSError(24, "Too many open files")

    async with fake_server(answer_well) as server:
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patched:
            patched.setattr(loop, "create_connection", out_of_files)
            outcome = await run_load(target_at(server.endpoint), closed(completion()))

    assert outcome.records[0].outcome is Outcome.UNREACHABLE
    assert any("no file descriptor or port left" in line for line in outcome.client.complaints)


async def test_a_chat_goes_on_with_what_was_answered() -> None:
    turns = (
        Turn(2, messages=(said("one"), said("two")), label="turn 1"),
        Turn(3, messages=(said("three"),), label="turn 2", think_s=0.01),
        Turn(1, messages=(said("four"),), label="turn 3"),
    )
    async with fake_server(answer_chat) as server:
        outcome = await run_load(target_at(server.endpoint), closed(Session(turns)))

    assert [call.path for call in server.calls] == ["/v1/chat/completions"] * 3
    assert server.calls[2].body["messages"] == [
        said("one"),
        said("two"),
        {"role": "assistant", "content": "2."},
        said("three"),
        {"role": "assistant", "content": "4.."},
        said("four"),
    ]
    first, second, third = outcome.records
    assert [record.label for record in outcome.records] == ["turn 1", "turn 2", "turn 3"]
    assert second.due_s == pytest.approx(first.ended_s + 0.01)
    assert third.due_s == second.ended_s


async def test_a_failed_turn_ends_its_session_and_no_other() -> None:
    async def refusing_the_second(call: Call, reply: Reply) -> None:
        if len(call.body["messages"]) == 3 and call.body["messages"][0] == said("bad"):
            await refuse(reply, 500)
        else:
            await answer_chat(call, reply)

    def chat(first: str) -> Session:
        return Session(tuple(Turn(1, messages=(said(text),)) for text in (first, "b", "c", "d")))

    outcome = await outcome_of(refusing_the_second, closed(chat("bad"), chat("good")))

    assert [record.index for record in outcome.records] == [0, 1, 4, 5, 6, 7]
    assert [record.index for record in outcome.records if not record.ok] == [1]
    assert outcome.notes == (
        "2 of 8 requests were not sent, because an earlier turn of their session had failed",
    )


async def test_an_open_loop_keeps_its_times_while_the_server_hangs() -> None:
    starts_s = [0.0, 0.02, 0.06, 0.04, 0.08]
    all_came, released = asyncio.Event(), asyncio.Event()

    async def hang(call: Call, reply: Reply) -> None:
        if len(server.calls) == len(starts_s):
            all_came.set()
        await released.wait()
        await answer_well(call, reply)

    sessions = [
        Session((Turn(1, tokens=(place,)),), start_s=start_s)
        for place, start_s in enumerate(starts_s)
    ]
    async with fake_server(hang) as server:
        running = asyncio.ensure_future(
            run_load(target_at(server.endpoint), Load("open", sessions))
        )
        await all_came.wait()
        assert server.in_flight == len(starts_s)
        released.set()
        outcome = await running

    assert sorted(call.body["prompt"] for call in server.calls) == [[0], [1], [2], [3], [4]]
    assert [record.due_s for record in outcome.records] == pytest.approx(starts_s)
    ended_s = min(record.ended_s for record in outcome.records)
    assert all(record.sent_s < ended_s for record in outcome.records)
    assert outcome.client.most_open == len(starts_s)


async def test_a_closed_loop_has_so_many_open_and_no_more() -> None:
    three_came, released = asyncio.Event(), asyncio.Event()

    async def hang(call: Call, reply: Reply) -> None:
        if server.in_flight == 3:
            three_came.set()
        await released.wait()
        await answer_well(call, reply)

    async with fake_server(hang) as server:
        load = closed(*[completion()] * 9, concurrency=3)
        running = asyncio.ensure_future(run_load(target_at(server.endpoint), load))
        await three_came.wait()
        released.set()
        outcome = await running

    assert server.most_in_flight == 3
    assert server.connections == 3
    assert len(outcome.records) == len(server.calls) == 9


async def test_equal_requests_have_to_get_equal_texts_if_asked() -> None:
    async def moody(call: Call, reply: Reply) -> None:
        await reply.head(transfer_encoding="chunked")
        await reply.event(token_event("yes" if len(server.calls) < 3 else "no", "length"))
        await reply.event(usage_event(3, 1))
        await reply.event(DONE)
        await reply.chunk(b"")

    drawn = {"temperature": 1.0}
    load = closed(
        completion(output_tokens=1, fields=drawn),
        *[completion(output_tokens=1)] * 2,
        completion(output_tokens=1, fields=drawn),
    )
    async with fake_server(moody) as server:
        checked = await run_load(target_at(server.endpoint), load, check_repeats=True)

    assert [record.ok for record in checked.records] == [True, True, False, True]
    assert checked.records[2].reason == "the text differs from that of an equal request"


async def test_a_warm_up_is_sent_before_and_counts_nowhere() -> None:
    async def refusing_warmth(call: Call, reply: Reply) -> None:
        if call.body["prompt"] == [9]:
            await refuse(reply, 500)
        else:
            await answer_well(call, reply)

    async with fake_server(refusing_warmth) as server:
        outcome = await run_load(
            target_at(server.endpoint),
            closed(completion()),
            warm_up=[completion((8,)), completion((9,))],
        )

    assert [call.body["prompt"] for call in server.calls] == [[8], [9], [5, 6, 7]]
    assert [record.index for record in outcome.records] == [0]
    (note,) = outcome.notes
    assert note.startswith("1 of 2 warm-up requests failed, the first with: status 500")


async def test_each_tenant_speaks_with_its_own_key() -> None:
    sessions = [Session((Turn(1, tokens=(1,)),), tenant=name) for name in ("acme", "other")]
    async with fake_server(answer_well, key="sk-own") as server:
        outcome = await run_load(
            target_at(server.endpoint), closed(*sessions), keys={"acme": "sk-acme"}
        )

    assert [call.headers["authorization"] for call in server.calls] == [
        "Bearer sk-acme",
        "Bearer sk-own",
    ]
    assert [record.tenant for record in outcome.records] == ["acme", "other"]


async def test_progress_metrics_and_answers_are_told() -> None:
    async def with_metrics(call: Call, reply: Reply) -> None:
        if call.path == "/metrics":
            await reply.whole(200, b"forebay_running 1.0\n")
        else:
            await answer_well(call, reply)

    told: list[Progress] = []
    texts: dict[int, str] = {}

    def keep(index: int, read: StreamReader) -> None:
        texts[index] = read.text

    async with fake_server(with_metrics) as server:
        outcome = await run_load(
            target_at(server.endpoint),
            closed(completion(), completion()),
            watch=Watch(server.endpoint),
            on_progress=told.append,
            on_answer=keep,
        )

    assert told[0][1:] == (2, 0, 0, 0, 0, 0)
    assert told[-1][1:] == (2, 2, 2, 0, 0, 4)
    assert [sample.running for sample in outcome.timeline] == [1.0, 1.0]
    assert texts == {0: "xx", 1: "xx"}


async def test_a_stop_keeps_what_has_ended_and_leaves_out_the_rest() -> None:
    stop = asyncio.Event()

    async def hang_from_the_third_on(call: Call, reply: Reply) -> None:
        if len(server.calls) < 3:
            await answer_well(call, reply)
        elif len(server.calls) == 4:
            stop.set()
            await asyncio.Event().wait()
        else:
            await asyncio.Event().wait()

    async with fake_server(hang_from_the_third_on) as server:
        outcome = await run_load(
            target_at(server.endpoint), closed(*[completion()] * 9, concurrency=2), stop=stop
        )

    assert outcome.interrupted
    assert [record.outcome for record in outcome.records] == [Outcome.OK] * 2
    assert outcome.notes == (
        "interrupted: 2 requests were open and are in no figure, 5 of 9 were never sent",
    )


async def test_a_stop_before_the_beginning_sends_nothing() -> None:
    stop = asyncio.Event()
    stop.set()
    async with fake_server(answer_well) as server:
        load = closed(completion())
        outcome = await run_load(target_at(server.endpoint), load, warm_up=load.sessions, stop=stop)

    assert (server.calls, outcome.records, outcome.wall_s) == ([], (), 0.0)
    assert outcome.notes == (
        "interrupted: 0 requests were open and are in no figure, 1 of 1 were never sent",
    )


async def test_a_stop_does_not_wait_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = asyncio.Event()

    async def never(self: Pool, count: int, timeout_s: float) -> None:
        stop.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Pool, "open", never)
    async with asyncio.timeout(5):
        outcome = await outcome_of(answer_well, closed(completion()), stop=stop)

    assert outcome.interrupted
    assert outcome.records == ()


async def test_a_cancelled_run_leaves_no_connection() -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def go_on_forever(call: Call, reply: Reply) -> None:
        await reply.head(transfer_encoding="chunked")
        came.set()
        try:
            while True:
                await reply.event(token_event("x"))
                await asyncio.sleep(0)
        except ConnectionError:
            left.set()
            raise

    async with fake_server(go_on_forever) as server:
        running = asyncio.ensure_future(run_load(target_at(server.endpoint), closed(completion())))
        await came.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await left.wait()

    assert len(server.calls) == 1
