"""GET /v1/usage, /admin/usage and /admin/ledger."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from gateway.ledger import book as book_module
from gateway.ledger import opening as opening_module
from gateway.ledger import pages as pages_module
from gateway.ledger.book import LedgerBook
from gateway.ledger.table import LedgerUnavailable
from gateway.ledger.usage import Usage, UsageQuery
from tests.gateway.database.both import KINDS, Place, place
from tests.gateway.ledger.rows import row
from tests.gateway.ledger.stage import client, opened_pages, pages, served
from tests.gateway.ledger.test_export import read_csv
from tests.gateway.stage import ADMIN, K1, K2, error_of, eventually


@pytest.fixture(params=KINDS)
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place(request.param, tmp_path, request)


async def test_a_tenant_sees_its_own_and_nobody_elses(anywhere: Place) -> None:
    async with opened_pages(anywhere) as stage, stage.client(K1) as acme, stage.client(K2) as beta:
        stage.here.ledger.note(row(cost_nusd=1500))
        stage.here.ledger.note(row(outcome="cancelled", met_slo=False, ttft_s=0.4))
        stage.here.ledger.note(row(model="large", met_slo=None))
        stage.here.ledger.note(row(tenant="beta", ttft_s=None, tpot_s=None))
        assert (await acme.get("/v1/usage?tenant=beta")).status_code == 400
        answer = (await acme.get("/v1/usage")).json()
        assert answer["group_by"] == "model"
        assert answer["end"] - answer["start"] == pytest.approx(86_400)
        large, small = answer["data"]
        assert large["model"] == "large"
        assert large["slo"]["attainment"] is None
        assert small == {
            "tenant": "acme",
            "model": "m",
            "requests": {"total": 2, "by_outcome": {"cancelled": 1, "success": 1}},
            "prompt_tokens": 200,
            "cached_tokens": {"total": 120, "device": 60, "dram": 40, "redis": 20},
            "written_tokens": 10,
            "output_tokens": 80,
            "cost_usd": "0.000002500",
            "cost_nusd": 2500,
            "storage": {"token_hours": 0.0, "cost_usd": "0.000000000", "cost_nusd": 0},
            "slo": {
                "promised": 2,
                "met": 1,
                "attainment": 0.5,
                "goodput_rps": pytest.approx(1 / 86_400),
            },
            "latency_ms": {
                "ttft": {"p50": 200.0, "p90": 400.0, "p95": 400.0, "p99": 400.0},
                "tpot": {"p50": 10.0, "p90": 10.0, "p95": 10.0, "p99": 10.0},
                "publish": None,
            },
        }
        assert answer["total"]["requests"]["total"] == 3
        assert "model" not in answer["total"]
        answer = (await beta.get("/v1/usage")).json()
        assert [each["tenant"] for each in answer["data"]] == ["beta"]
        assert answer["data"][0]["latency_ms"] == {"ttft": None, "tpot": None, "publish": None}


async def test_buckets_of_time_have_their_own_goodput(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    hour_s = time.time() // 3600 * 3600
    async with (
        opened_pages(place("sqlite", tmp_path, request)) as stage,
        stage.client(K1) as acme,
    ):
        for _ in range(36):
            stage.here.ledger.note(row(finished_s=hour_s - 3000))
        stage.here.ledger.note(row(finished_s=hour_s - 3600 - 1))
        start_s, end_s = hour_s - 2 * 3600, hour_s - 1800
        url = f"/v1/usage?group_by=hour&start={start_s}&end={end_s}"
        answer = (await acme.get(url)).json()
        first, second = answer["data"]
        assert (first["start"], second["start"]) == (hour_s - 7200, hour_s - 3600)
        assert first["slo"]["goodput_rps"] == pytest.approx(1 / 3600)
        assert second["slo"]["goodput_rps"] == pytest.approx(36 / 1800)
        assert answer["total"]["slo"]["goodput_rps"] == pytest.approx(37 / 5400)


class SlowBook:
    """A ledger that does not answer before its gate is open, and then that it cannot."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = 0

    async def usage(self, *queries: UsageQuery) -> list[list[Usage]]:
        self.asked += 1
        await self.gate.wait()
        raise LedgerUnavailable("slow")


async def test_a_tenant_asks_only_so_much_at_once() -> None:
    slow = SlowBook()
    app = pages(cast(LedgerBook, slow))
    async with client(app, K1) as acme, client(app, K2) as beta:
        asked = [asyncio.create_task(acme.get("/v1/usage")) for _ in range(6)]
        await eventually(lambda: sum(each.done() for each in asked) == 2)
        other = asyncio.create_task(beta.get("/v1/usage"))
        await eventually(lambda: slow.asked == 5)
        slow.gate.set()
        answers = await asyncio.gather(*asked, other)
        assert sorted(each.status_code for each in answers) == [429, 429, *[503] * 5]
        assert all("retry-after" in each.headers for each in answers)
        assert (await acme.get("/v1/usage")).status_code == 503


async def test_the_operator_sees_all(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with (
        opened_pages(place("sqlite", tmp_path, request)) as stage,
        stage.client(ADMIN) as operator,
    ):
        stage.here.ledger.note(row(service_class="batch"))
        stage.here.ledger.note(row(tenant="gone", kind="storage", token_hours=2.0, key=""))
        answer = (await operator.get("/admin/usage?group_by=service_class")).json()
        assert [(each["tenant"], each["service_class"]) for each in answer["data"]] == [
            ("acme", "batch"),
            ("gone", "standard"),
        ]
        assert answer["data"][1]["requests"] == {"total": 0, "by_outcome": {}}
        assert answer["data"][1]["storage"]["token_hours"] == 2.0
        assert answer["total"]["cost_nusd"] == 2000
        assert "tenant" not in answer["total"]
        answer = (await operator.get("/admin/usage?tenant=gone")).json()
        assert [each["tenant"] for each in answer["data"]] == ["gone"]
        answer = (await operator.get("/admin/usage?tenant=nobody")).json()
        assert (answer["data"], answer["total"]) == ([], None)


async def test_the_whole_ledger_page_by_page(
    anywhere: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "_ROWS_AT_ONCE", 4)
    now_s = time.time()
    rows = [row(finished_s=now_s - 10 - number // 3) for number in range(20)]
    rows += [row(finished_s=now_s - 10, tenant="beta"), row(finished_s=now_s - 90_000)]
    async with opened_pages(anywhere) as stage, stage.client(ADMIN) as operator:
        for each in rows:
            stage.here.ledger.note(each)
        in_order = sorted(rows[:-1], key=lambda each: (each.finished_s, each.id))
        response = await operator.get("/admin/ledger?format=jsonl")
        assert response.headers["content-type"] == "application/jsonl"
        found = [json.loads(line)["id"] for line in response.text.splitlines()]
        assert found == [each.id for each in in_order]
        response = await operator.get("/admin/ledger?tenant=beta&start=0")
        assert response.headers["content-type"].startswith("text/csv")
        assert response.headers["content-disposition"] == 'attachment; filename="ledger.csv"'
        assert [each["id"] for each in read_csv(response.content)] == [rows[20].id]
        response = await operator.get(f"/admin/ledger?format=jsonl&start=0&end={now_s - 20}")
        assert json.loads(response.text)["id"] == rows[-1].id
        response = await operator.get("/admin/ledger?tenant=nobody")
        assert read_csv(response.content) == []
        assert response.text.startswith("id,request_id,")
        response = await operator.head("/admin/ledger")
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/usage?group_by=color", 400, "group_by"),
        ("/v1/usage?start=soon", 400, "start"),
        ("/v1/usage?start=0", 400, "start"),
        ("/v1/usage?group_by=hour&start=2026-01-01&end=2026-03-01", 400, "group_by"),
        ("/admin/usage", 401, None),
        ("/admin/ledger", 401, None),
    ],
)
async def test_refusals(
    path: str, status: int, param: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with (
        opened_pages(place("sqlite", tmp_path, request)) as stage,
        stage.client(K1) as acme,
    ):
        response = await acme.get(path)
        assert response.status_code == status
        assert error_of(response)["param"] == param


async def test_an_export_knows_its_formats(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with (
        opened_pages(place("sqlite", tmp_path, request)) as stage,
        stage.client(ADMIN) as operator,
    ):
        response = await operator.get("/admin/ledger?format=xml")
        assert error_of(response)["param"] == "format"


@pytest.mark.parametrize("path", ["/admin/usage", "/admin/ledger"])
async def test_what_no_tenant_was_ever_called_is_refused(path: str, anywhere: Place) -> None:
    async with opened_pages(anywhere) as stage, stage.client(ADMIN) as operator:
        response = await operator.get(path + "?tenant=%00")
        assert response.status_code == 400
        assert error_of(response)["param"] == "tenant"


async def test_without_a_ledger_it_says_so() -> None:
    app = pages(None)
    async with client(app, K1) as acme, client(app, ADMIN) as operator:
        for response in (
            await acme.get("/v1/usage"),
            await operator.get("/admin/usage"),
            await operator.get("/admin/ledger"),
        ):
            assert response.status_code == 503
            assert error_of(response)["code"] == "ledger_unavailable"
            assert int(response.headers["retry-after"]) > 0
        unknown = await operator.get("/v1/usage")
        assert unknown.status_code == 401


async def test_a_database_that_is_lost_is_a_503_or_a_cut(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "_ROWS_AT_ONCE", 2)
    async with (
        opened_pages(place("sqlite", tmp_path, request)) as stage,
        stage.client(ADMIN) as operator,
    ):
        for _ in range(5):
            stage.here.ledger.note(row())
        assert (await operator.get("/admin/usage")).status_code == 200
        async with stage.here.database.begin() as connection:
            await connection.exec_driver_sql("ALTER TABLE requests RENAME TO elsewhere")
        for path in ("/admin/usage", "/admin/ledger"):
            response: httpx.Response = await operator.get(path)
            assert error_of(response)["code"] == "ledger_unavailable"
            assert "elsewhere" not in response.text


async def test_an_export_that_breaks_off_does_not_look_whole(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages_read = 0

    async def read_page(*arguments: Any) -> pages_module.Page:
        nonlocal pages_read
        pages_read += 1
        if pages_read > 2:
            raise OperationalError("SELECT", {}, Exception("gone"))
        return await pages_module.read_page(*arguments)

    monkeypatch.setattr(pages_module, "_ROWS_AT_ONCE", 2)
    monkeypatch.setattr(book_module, "read_page", read_page)
    async with opened_pages(place("sqlite", tmp_path, request)) as stage:
        for _ in range(9):
            stage.here.ledger.note(row())
        async with served(stage.app) as port, httpx.AsyncClient() as operator:
            headers = {"authorization": f"Bearer {ADMIN}"}
            with pytest.raises(httpx.RemoteProtocolError):
                await operator.get(f"http://127.0.0.1:{port}/admin/ledger", headers=headers)


async def test_an_export_to_a_client_that_left_ends(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    class Watched(LedgerBook):
        async def pages(self, *arguments: Any) -> AsyncGenerator[pages_module.Page]:
            try:
                async with aclosing(super().pages(*arguments)) as found:
                    async for page in found:
                        while True:  # a ledger without an end
                            yield page._replace(last=pages_module.Place(0.0, ""))
            finally:
                ended.set()

    monkeypatch.setattr(opening_module, "LedgerBook", Watched)
    async with opened_pages(place("sqlite", tmp_path, request)) as stage:
        stage.here.ledger.note(row(replica="x" * 200))
        async with served(stage.app) as port, httpx.AsyncClient() as operator:
            headers = {"authorization": f"Bearer {ADMIN}"}
            url = f"http://127.0.0.1:{port}/admin/ledger"
            async with operator.stream("GET", url, headers=headers) as response:
                assert response.status_code == 200
            async with asyncio.timeout(5):
                await ended.wait()
