"""However a request ends, it is settled once: limits, ledger, promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import httpx
import orjson
import pytest

from engine.request import EngineOutput, EngineRequest
from gateway.deadline import out_of_time
from gateway.errors import ApiError, bad_request, limit_exceeded, unavailable
from gateway.http_call import HttpCall
from gateway.ledger.row import LedgerRow
from gateway.replica import TokenStream
from gateway.request import Relayed, Request
from gateway.settlement import settled
from gateway.slo.admission import Admission, Downgrade, OwnDeadline
from gateway.tenancy import Tenancy
from gateway.tenants import Caller, KeyRing, Tenant
from policies.limits import Demand
from policies.service_class import ServiceClass
from policies.slo import Slo
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.slo.no_book import NoSloBook
from tests.gateway.stage import (
    CHAT,
    COMPLETIONS,
    K1,
    Stage,
    chat,
    error_of,
    events,
    eventually,
    prompt,
    tenant,
)

PRICED = {"price": {"input": 1, "cached_input": 0.5, "output": 2}}


@dataclass
class Reserved:
    """One reservation and what became of it."""

    caller: Caller
    model: str
    demand: Demand
    settled: list[tuple[int, int]] = field(default_factory=list)
    held: bool = False
    headers: ClassVar = [(b"x-ratelimit-limit-requests", b"60")]

    def settle(self, tokens: int, cost_nusd: int) -> None:
        assert self.held, "what was given back cannot be settled"
        self.settled.append((tokens, cost_nusd))

    def __enter__(self) -> Reserved:
        self.held = True
        return self

    def __exit__(self, *_: object) -> None:
        self.held = False


@dataclass
class Books:
    """A limiter, a ledger and a book of promises that remember what they are told."""

    reserved: list[Reserved] = field(default_factory=list)
    rows: list[LedgerRow] = field(default_factory=list)
    sheds: list[str] = field(default_factory=list)
    refuses: bool = False
    slo: NoSloBook = field(default_factory=NoSloBook)

    async def reserve(self, caller: Caller, model: str, demand: Demand) -> Reserved:
        if self.refuses:
            raise limit_exceeded("Too many.", code="rate_limit_exceeded", retry_after_s=7)
        self.reserved.append(Reserved(caller, model, demand))
        return self.reserved[-1]

    def headers(self, caller: Caller) -> list[tuple[bytes, bytes]]:
        return [(b"x-ratelimit-remaining-requests", b"3")]

    def note(self, row: LedgerRow) -> None:
        self.rows.append(row)

    def shed(self, tenant: Tenant, model: str, *, promised: bool = True) -> None:
        self.sheds.append(f"{tenant.id} {model}")


class Promises(NoSloBook):
    """Notes who was shed."""

    def __init__(self, books: Books) -> None:
        self.shed = books.shed  # type: ignore[method-assign] # it only listens


class Crowded(Admission):
    """Has no room for model m in time."""

    async def admit(self, tenant: Tenant, router: Any, ask: Any, terms: Any, **how: Any) -> None:
        if router.model == "m" and how["may_downgrade"]:
            raise Downgrade("org/other")
        if router.model == "m":
            raise unavailable("Too late.", code="slo_unattainable", retry_after_s=3)


def stage_with(books: Books, admission: Admission | None = None, **fields: Any) -> Stage:
    def keep_account(tenancy: Tenancy) -> None:
        tenancy.limiter = tenancy.ledger = books
        tenancy.slo = Promises(books)
        tenancy.admission = admission or Admission()

    return Stage(keep_account=keep_account, model=PRICED, **fields)


async def test_a_whole_answer_is_settled_at_what_it_used():
    books = Books()
    stage = stage_with(books, replica=ScriptedReplica(b"abcd"))
    response = await stage.post(COMPLETIONS, prompt("x" * 20, max_tokens=50))
    assert response.json()["usage"]["completion_tokens"] == 5
    assert response.headers["x-ratelimit-limit-requests"] == "60"
    (reserved,) = books.reserved
    assert (reserved.caller.tenant.id, reserved.model) == ("acme", "m")
    assert reserved.demand == Demand(70, 70, 120_000, 120_000)
    assert reserved.settled == [(25, 20 * 1000 + 5 * 2000)]
    assert not reserved.held
    (row,) = books.rows
    assert row.request_id == response.headers["x-request-id"]
    assert (row.tenant, row.model, row.endpoint) == ("acme", "m", "completions")
    assert (row.outcome, row.status, row.streamed) == ("success", 200, False)
    assert (row.prompt_tokens, row.output_tokens, row.cost_nusd) == (20, 5, 30_000)
    assert row.key == reserved.caller.key.id
    assert row.replica == "fake/0"
    assert row.ttft_s is not None
    assert row.publish_s is not None
    assert 0 < row.ttft_s <= row.publish_s <= row.e2e_s


async def test_a_stream_says_its_limits_and_is_written_down_once():
    books = Books()
    stage = stage_with(books)
    response = await stage.post(CHAT, chat(stream=True))
    assert response.headers["x-ratelimit-limit-requests"] == "60"
    assert events(response.text)[-1] == "[DONE]"
    assert len(books.rows) == len(books.reserved) == 1
    assert books.rows[0].streamed
    # text that is a token's is published with it
    assert books.rows[0].publish_s == pytest.approx(books.rows[0].ttft_s, abs=0.05)


async def test_a_client_that_leaves_pays_for_what_was_computed():
    books = Books()
    stage = stage_with(books, replica=ScriptedReplica(b"x" * 400, step_s=0.005))
    async with stage.served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"model":"m","prompt":"hello","stream":true,"max_tokens":400}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (K1.encode(), len(body), body)
        )
        await reader.readuntil(b"data: ")
        await eventually(lambda: stage.replica.generated >= 20)
        writer.close()
        await eventually(lambda: books.rows)
    (row,) = books.rows
    assert row.outcome == "cancelled"
    assert 20 <= row.output_tokens < 400
    assert row.cost_nusd == 5 * 1000 + row.output_tokens * 2000
    assert books.reserved[0].settled == [(5 + row.output_tokens, row.cost_nusd)]
    assert not books.reserved[0].held


async def test_what_was_answered_to_its_end_is_no_client_that_left():
    """A server says that the client is gone as soon as it has the whole answer."""
    books = Books()
    stage = stage_with(books, replica=ScriptedReplica(b"abcd", step_s=0.001))
    async with stage.served() as port, httpx.AsyncClient() as client:
        response = await client.post(
            f"http://127.0.0.1:{port}{CHAT}",
            json=chat(stream=True, n=3, temperature=1),
            headers={"authorization": f"Bearer {K1}"},
        )
        assert events(response.text)[-1] == "[DONE]"
        await eventually(lambda: books.rows)
    assert books.rows[0].outcome == "success"


async def test_a_line_of_a_batch_that_is_cut_off_costs_nothing_as_it_is_run_again():
    books = Books()
    stage = stage_with(books, replica=ScriptedReplica(b"x" * 400, step_s=0.005))
    assert stage.app is not None
    lines = stage.tenancy.lines
    assert lines is not None
    caller = stage.runtime.current.key_ring.identify(f"Bearer {K1}")
    body = prompt("hello", max_tokens=400)
    line = asyncio.create_task(
        lines.run(caller, COMPLETIONS, body, batch_id="batch_1", line_id="line-1")
    )
    await eventually(lambda: stage.replica.generated >= 20)
    line.cancel()
    with pytest.raises(asyncio.CancelledError):
        await line
    (row,) = books.rows
    assert (row.outcome, row.batch, row.cost_nusd) == ("cancelled", "batch_1", 0)
    assert row.output_tokens >= 20
    assert books.reserved[0].settled == []
    assert not books.reserved[0].held


async def test_what_fails_through_our_fault_is_written_down_and_costs_nothing():
    books = Books()
    stage = stage_with(books, replica=ScriptedReplica(fails_after=3))
    response = await stage.post(COMPLETIONS, prompt())
    assert response.status_code == 500
    assert books.reserved[0].settled == []
    assert not books.reserved[0].held
    (row,) = books.rows
    assert (row.outcome, row.status, row.cost_nusd) == ("error", 500, 0)
    assert row.output_tokens == 3


async def test_what_is_refused_has_reserved_nothing_and_is_not_in_the_ledger():
    books = Books()
    stage = stage_with(books, max_context=64)
    for body in (chat(temperature=9), chat("x" * 400), {**chat(), "model": "nope"}):
        response = await stage.post(CHAT, body)
        assert response.status_code in (400, 404)
        assert response.headers["x-ratelimit-remaining-requests"] == "3"
    assert books.reserved == books.rows == []


async def test_a_limit_refuses_before_anything_runs():
    books = Books(refuses=True)
    stage = stage_with(books)
    for stream in (False, True):
        response = await stage.post(CHAT, chat(stream=stream))
        assert response.status_code == 429
        assert response.headers["retry-after"] == "7"
        assert response.headers["x-ratelimit-remaining-requests"] == "3"
        assert error_of(response)["type"] == "rate_limit_error"
    assert stage.replica.requests == []
    assert books.rows == []


async def test_replicas_that_are_full_give_back_what_was_reserved():
    books = Books()
    stage = stage_with(books, replica=ScriptedReplica(full=True))
    response = await stage.post(CHAT, chat())
    assert response.status_code == 503
    assert books.reserved[0].settled == []
    assert not books.reserved[0].held
    assert books.rows[0].outcome == "unavailable"
    assert books.rows[0].output_tokens == 0


async def test_a_promise_is_judged_and_written_down():
    owner = tenant("acme", slo=Slo(ttft_s=30.0), service_class=ServiceClass.INTERACTIVE)
    books = Books()
    stage = stage_with(books, tenants={K1: owner})
    await stage.post(CHAT, chat())
    strict = Books()
    hurried = tenant("acme", slo=Slo(tpot_s=1e-9))
    stage = stage_with(strict, replica=ScriptedReplica(step_s=0.001), tenants={K1: hurried})
    await stage.post(CHAT, chat())
    assert strict.rows[0].met_slo is False


DOWN = Slo(ttft_s=1.0, on_overload="downgrade", downgrade_to="org/other")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_downgraded_request_says_what_ran_and_pays_for_that_alone(stream: bool):
    books = Books()
    stage = stage_with(books, Crowded(), tenants={K1: tenant("acme", slo=DOWN)})
    if stream:
        said = await stage.stream(CHAT, chat())
        assert {chunk["model"] for chunk in said[:-1]} == {"org/other"}
    else:
        response = await stage.post(CHAT, chat())
        assert response.json()["model"] == "org/other"
    asked, ran = books.reserved
    assert (asked.model, ran.model) == ("m", "org/other")
    assert (asked.settled, asked.held, ran.held) == ([], False, False)
    assert len(ran.settled) == 1
    (row,) = books.rows
    assert (row.model, row.cost_nusd) == ("org/other", 0)
    assert books.sheds == []


async def test_nobody_is_downgraded_to_a_model_that_they_may_not_use():
    books = Books()
    owner = tenant("acme", slo=DOWN, models=("m",))
    stage = stage_with(books, Crowded(), tenants={K1: owner})
    response = await stage.post(CHAT, chat())
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert books.sheds == ["acme m"]
    assert books.rows == []
    (asked,) = books.reserved
    assert (asked.settled, asked.held) == ([], False)


async def test_a_deadline_ends_a_whole_answer_with_a_504_and_frees_the_replica():
    books = Books()
    replica = ScriptedReplica(b"x" * 100, gate=asyncio.Event())
    stage = stage_with(books, replica=replica)
    async with stage.client() as client:
        response = await client.post(
            CHAT, json=chat(), headers={"x-request-timeout-ms": "50"}, timeout=5
        )
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"
    await eventually(lambda: replica.open == 0)
    assert books.rows[0].outcome == "expired"


async def test_a_deadline_ends_a_stream_with_one_error_event():
    books = Books()
    replica = ScriptedReplica(b"x" * 4000, step_s=0.005)
    stage = stage_with(books, replica=replica, max_context=1 << 16)
    async with stage.client() as client:
        response = await client.post(
            CHAT,
            json=chat(stream=True, max_tokens=4000),
            headers={"x-request-timeout-ms": "150"},
            timeout=5,
        )
    assert response.status_code == 200
    said = events(response.text)
    assert said[-1]["error"]["code"] == "deadline_exceeded"
    assert sum("error" in event for event in said) == 1
    assert len(said) > 2
    await eventually(lambda: replica.open == 0)
    assert books.rows[0].outcome == "expired"
    assert 0 < books.rows[0].output_tokens < 4000


async def test_a_deadline_before_the_first_token_was_due_breaks_no_promise():
    books = Books()
    owner = tenant("acme", slo=Slo(ttft_s=30.0))
    replica = ScriptedReplica(b"x" * 100, gate=asyncio.Event())
    stage = stage_with(books, replica=replica, tenants={K1: owner})
    async with stage.client() as client:
        response = await client.post(CHAT, json=chat(), headers={"x-request-timeout-ms": "60"})
    assert response.status_code == 504
    assert (books.rows[0].outcome, books.rows[0].met_slo) == ("expired", None)


class Finicky(ScriptedReplica):
    """Finds a mistake in what was let in, as a server elsewhere may."""

    @asynccontextmanager
    async def submit(self, request: EngineRequest) -> AsyncIterator[TokenStream]:
        raise bad_request("A mistake of yours.")
        yield


async def test_a_mistake_of_its_clients_that_is_found_late_breaks_no_promise():
    books = Books()
    owner = tenant("acme", slo=Slo(ttft_s=30.0))
    stage = stage_with(books, replica=Finicky(), tenants={K1: owner})
    assert (await stage.post(CHAT, chat())).status_code == 400
    (row,) = books.rows
    assert (row.outcome, row.met_slo, row.cost_nusd) == ("refused", None, 0)


async def test_what_fails_breaks_its_promise_and_has_no_times():
    stage = Stage(
        replica=ScriptedReplica(fails_after=3), tenants={K1: tenant("acme", slo=Slo(ttft_s=30.0))}
    )
    assert (await stage.post(CHAT, chat())).status_code == 500
    report = stage.tenancy.slo.report("acme", "m")
    assert (report.total.promised, report.total.met) == (1, 0)
    assert set(report.latencies) == {None}


async def test_lines_of_a_batch_were_promised_nothing():
    books = Books()
    owner = tenant("acme", slo=Slo(ttft_s=1e-9), service_class=ServiceClass.BATCH)
    stage = stage_with(books, tenants={K1: owner})
    assert stage.app is not None
    caller = stage.runtime.current.key_ring.identify(f"Bearer {K1}")
    await stage.tenancy.lines.run(
        caller, COMPLETIONS, prompt("hello", max_tokens=4), batch_id="batch_1", line_id="line-1"
    )
    await stage.post(COMPLETIONS, prompt("hello", max_tokens=4))
    line, request = books.rows
    assert (line.outcome, line.batch, line.met_slo) == ("success", "batch_1", None)
    assert (request.batch, request.met_slo) == ("", False)


@pytest.mark.parametrize(("stream", "met"), [(False, None), (True, False)])
async def test_what_ran_out_of_time_elsewhere_breaks_a_promise_if_a_first_token_would_be_seen(
    stream: bool, met: bool | None
):
    books = Books()
    stage = stage_with(books, tenants={K1: tenant("acme", slo=Slo(ttft_s=1.0))})
    assert stage.app is not None
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "state": {}}
    call = HttpCall({**scope, "state": {"request_id": "req-1"}}, None, None)
    call.started_s -= 60
    request = Request(call, "chat", stage.runtime.current, relayed=Relayed(stream=stream))
    request.caller = stage.runtime.current.key_ring.identify(f"Bearer {K1}")
    request.authenticate()
    request.model = stage.models["m"]
    request.reservation = Reserved(request.caller, "m", Demand(1, 1, 1, 1))
    with pytest.raises(ApiError), settled(request, stage.metrics, stage.tenancy):
        raise out_of_time()
    assert (books.rows[0].outcome, books.rows[0].met_slo) == ("expired", met)


class OneAtATime(ScriptedReplica):
    """Has room for one sequence."""

    @asynccontextmanager
    async def submit(self, request: EngineRequest) -> AsyncIterator[TokenStream]:
        async with super().submit(request) as outputs:
            yield self._in_turn(outputs)

    async def _in_turn(self, outputs: TokenStream) -> AsyncIterator[EngineOutput]:
        self.turn = getattr(self, "turn", None) or asyncio.Lock()
        async with self.turn:
            async for output in outputs:
                yield output


@pytest.mark.parametrize("stream", [False, True])
async def test_between_tokens_is_no_waiting_for_other_choices(stream: bool):
    books = Books()
    stage = stage_with(books, replica=OneAtATime(b"x" * 9, step_s=0.002))
    response = await stage.post(CHAT, chat(n=4, temperature=1, stream=stream))
    assert response.status_code == 200
    (row,) = books.rows
    assert row.output_tokens == 40
    assert row.tpot_s is not None
    assert 0 < row.tpot_s * (40 - 4) <= row.e2e_s  # what belongs to one choice belongs to no other


class Hurried(Admission):
    """Finds that there is less time than the request takes."""

    async def admit(self, *_: object, **__: object) -> None:
        raise OwnDeadline(503, "too late", code="slo_unattainable", headers={"retry-after": "1"})


async def test_nor_is_its_refusal_a_want_of_room():
    books = Books()
    stage = stage_with(books, Hurried(), tenants={K1: tenant("acme", slo=Slo(ttft_s=30.0))})
    assert (await stage.post(CHAT, chat())).status_code == 503
    assert books.sheds == []


async def test_a_key_that_is_revoked_while_the_body_comes_gets_nothing():
    books, replica = Books(), ScriptedReplica()
    stage = stage_with(books, replica=replica)

    async def slowly() -> AsyncIterator[bytes]:
        whole = orjson.dumps(chat())
        yield whole[:5]
        stage.runtime.replace(replace(stage.runtime.current, key_ring=KeyRing(())))
        yield whole[5:]

    async with stage.client() as client:
        response = await client.post(CHAT, content=slowly())
    assert response.status_code == 401
    assert (replica.requests, books.rows) == ([], [])


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", "999999999999"])
async def test_a_deadline_that_is_none_is_refused(value: str):
    books = Books()
    stage = stage_with(books)
    async with stage.client() as client:
        response = await client.post(CHAT, json=chat(), headers={"x-request-timeout-ms": value})
    assert response.status_code == 400
    assert "x-request-timeout-ms" in error_of(response)["message"]
    assert books.reserved == []
