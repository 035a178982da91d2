"""Uploads and downloads: their limits, and what is left of those that fail."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from sqlalchemy import func, select

from gateway.batches.file_draft import PART_BYTES
from gateway.batches.ids import first_id
from gateway.database.opening import Database, LateDatabase
from gateway.database.schema import file_parts, files
from tests.gateway.batches.stage import (
    PATH,
    BatchStage,
    FakeLines,
    FakeTime,
    Mortal,
    jsonl,
    line,
    lines,
)
from tests.gateway.stage import ADMIN, K1, K2, error_of

BOUNDARY = "b" * 20
TYPE = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def field(name: str, value: bytes, filename: str | None = None, more: bytes = b"") -> bytes:
    said = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
    head = f"--{BOUNDARY}\r\nContent-Disposition: {said}\r\n".encode() + more
    return head + b"\r\n" + value + b"\r\n"


def form(*fields: bytes) -> bytes:
    return b"".join(fields) + f"--{BOUNDARY}--\r\n".encode()


PURPOSE = field("purpose", b"batch")
FILE = field("file", b"{}\n", "in.jsonl")


async def rows(database: Database) -> tuple[int, int]:
    """How many files and parts there are."""
    async with database.read() as connection:
        count = [
            await connection.scalar(select(func.count()).select_from(table))
            for table in (files, file_parts)
        ]
    return count[0], count[1]


async def send(stage: BatchStage, body: Any, headers: dict[str, str] | None = None) -> Any:
    async with stage.client() as client:
        return await client.post("/v1/files", content=body, headers=headers or TYPE)


async def test_a_large_file_comes_and_goes_in_parts(database: Database):
    stage = BatchStage(database)
    content = bytes(range(256)) * 20_000

    async def pieces() -> AsyncIterator[bytes]:
        yield field("file", b"", "big")[:-2]
        for start in range(0, len(content), 77_777):
            yield content[start : start + 77_777]
        yield b"\r\n" + PURPOSE
        yield form()

    async with stage.gateway() as opened:
        response = await send(stage, pieces())
        assert response.status_code == 200, response.text
        card = response.json()
        assert card["bytes"] == len(content)
        async with aclosing(opened.files.content(card["id"])) as parts:
            sizes = [len(part) async for part in parts]
        assert sizes[:-1] == [PART_BYTES] * (len(content) // PART_BYTES)
        async with stage.client() as client:
            got = await client.get(f"/v1/files/{card['id']}/content")
            assert got.content == content
            assert got.headers["content-length"] == str(len(content))
            head = await client.head(f"/v1/files/{card['id']}/content")
            assert (head.status_code, head.content) == (200, b"")


async def test_an_upload_takes_no_more_memory_than_a_few_parts(sqlite: Database):
    stage = BatchStage(sqlite)
    piece = b"x" * 65_536

    def pieces() -> Iterator[bytes]:
        yield field("file", b"", "big")[:-2]
        for _ in range(400):
            yield piece
        yield b"\r\n" + form(PURPOSE)

    async def slowly() -> AsyncIterator[bytes]:
        for each in pieces():
            yield each

    async with stage.gateway():
        await send(stage, form(PURPOSE, FILE))
        tracemalloc.start()
        try:
            response = await send(stage, slowly())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert response.json()["bytes"] == 400 * 65_536
    assert peak < 8 << 20


REFUSED = {
    "no purpose": (form(FILE), 400, "purpose"),
    "another purpose": (form(field("purpose", b"vision"), FILE), 400, "purpose"),
    "no file": (form(PURPOSE), 400, "file"),
    "two files": (form(PURPOSE, FILE, FILE), 400, "file"),
    "an empty file": (form(PURPOSE, field("file", b"", "in.jsonl")), 400, "file"),
    "cut off": (form(PURPOSE, FILE)[:-9], 400, None),
    "no form": (b"no form", 400, None),
    "nothing": (b"", 400, None),
    "no name": (form(PURPOSE, field("", b"x"), FILE), 400, None),
    "fields": (form(PURPOSE, *[field(f"f{n}", b"x") for n in range(40)], FILE), 400, None),
    "a long field": (form(PURPOSE, field("x", b"x" * 5000), FILE), 400, None),
    "a long head": (form(PURPOSE, field("file", b"x", "n" * 9000)), 400, None),
    "a long file": (form(PURPOSE, field("file", b"x" * 2000, "in.jsonl")), 413, None),
    "something behind it": (form(PURPOSE, FILE) + b"\r\n" * 200_000, 413, None),
}


async def test_what_is_no_upload_is_refused_and_leaves_nothing(sqlite: Database):
    stage = BatchStage(sqlite, batch={"max_bytes": 1024})

    async def slowly(body: bytes) -> AsyncIterator[bytes]:
        size = 7 if len(body) < 3000 else 5000
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async with stage.gateway():
        for what, (body, status, param) in REFUSED.items():
            for sent in (body, slowly(body)):
                response = await send(stage, sent)
                assert response.status_code == status, (what, response.text)
                assert error_of(response)["param"] == param, what
        assert await rows(sqlite) == (0, 0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 400),
        ({"content-type": "multipart/form-data"}, 400),
        ({"content-type": f"multipart/form-data; boundary={'b' * 500}"}, 400),
        ({**TYPE, "content-encoding": "gzip"}, 415),
        ({**TYPE, "authorization": f"Bearer {ADMIN}"}, 401),
    ],
)
async def test_its_headers_are_checked_first(sqlite: Database, headers: Any, status: int):
    stage = BatchStage(sqlite)
    async with stage.gateway():
        response = await send(stage, form(PURPOSE, FILE), headers)
        assert response.status_code == status
        assert error_of(response)
        assert await rows(sqlite) == (0, 0)


async def test_names_and_lifetimes(sqlite: Database):
    time = FakeTime()
    stage = BatchStage(sqlite, batch={"file_ttl": "2h"}, clock=time)
    async with stage.gateway() as opened:
        lasting = await send(
            stage,
            form(
                field("file", b"{}\n", "..\\..\\etc/a\x01b\u00e9.jsonl"),
                field("expires_after[anchor]", b"created_at"),
                field("expires_after[seconds]", b"2592000"),
                PURPOSE,
                field("unknown", b"field"),
            ),
        )
        card = lasting.json()
        assert card["filename"] == "ab\u00e9.jsonl"
        assert card["expires_at"] == card["created_at"] + 7200  # the operator's word
        short = await stage.upload(
            b"{}", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        )
        time.now_s += 3601
        assert (await stage.get(f"/v1/files/{short}"))["error"]["code"] == "file_not_found"
        assert [each["id"] for each in (await stage.get("/v1/files"))["data"]] == [card["id"]]
        await opened.files.sweep()
        assert await rows(sqlite) == (1, 1)


async def test_a_client_that_leaves_leaves_nothing(sqlite: Database):
    stage = BatchStage(sqlite)
    messages = [
        {"type": "http.request", "body": field("file", b"x" * 3_000_000, "f"), "more_body": True},
        {"type": "http.disconnect"},
    ]
    seen: list[tuple[int, int]] = []

    async def receive() -> Any:
        if len(messages) == 1:
            seen.append(await rows(sqlite))
        return messages.pop(0)

    async def send_nothing(message: Any) -> None:
        raise AssertionError("there is nobody to answer")

    headers = [(b"authorization", f"Bearer {K1}".encode())]
    headers += [(name.encode(), value.encode()) for name, value in TYPE.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": headers}
    async with stage.gateway():
        await stage.app(scope, receive, send_nothing)
    assert seen == [(0, 2)]
    assert await rows(sqlite) == (0, 0)


async def test_nothing_comes_of_an_upload_whose_tenant_is_deleted_meanwhile(sqlite: Database):
    stage = BatchStage(sqlite)

    async def body() -> AsyncIterator[bytes]:
        yield form(PURPOSE, field("file", b"x" * 3_000_000, "f"))[:-20]
        stage.use({K2: stage.tenants[K2]})
        yield form(PURPOSE, field("file", b"x" * 3_000_000, "f"))[-20:]

    async with stage.gateway():
        response = await send(stage, body())
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"
    assert await rows(sqlite) == (0, 0)


async def test_parts_that_nobody_published_are_swept(database: Database):
    time = FakeTime()
    stage = BatchStage(database, clock=time)
    async with stage.gateway() as opened:
        kept = await stage.upload(b"{}")
        draft = await opened.files.draft()  # of a gateway that was killed
        await draft.write(b"x" * 10)
        await draft.end()
        assert await rows(database) == (1, 2)
        await opened.files.sweep()
        assert await rows(database) == (1, 2)
        time.now_s += 7 * 3600
        await opened.files.sweep()
        assert await rows(database) == (1, 1)
        assert (await stage.get(f"/v1/files/{kept}"))["bytes"] == 2


async def test_a_tenant_holds_so_much_and_no_more(database: Database):
    stage = BatchStage(database, batch={"max_bytes": 1024})
    release = asyncio.Event()

    async def wait(name: str) -> Any:
        await release.wait()
        raise TimeoutError

    async with stage.gateway(FakeLines(wait)):
        content = jsonl(line("one"))
        big = content + b"\n" * (1024 - len(content))
        made = [await stage.upload(big) for _ in range(19)]
        body = {"input_file_id": made[0], "endpoint": PATH, "completion_window": "24h"}
        # what an open batch has copied counts as well
        batch = await stage.post("/v1/batches", body)
        assert batch["status"] == "validating"
        assert (await stage.post("/v1/batches", body))["error"]["code"] == "storage_limit_exceeded"
        async with stage.client() as client:
            refused = await client.post(
                "/v1/files", files={"file": ("f", big)}, data={"purpose": "batch"}
            )
            assert error_of(refused)["code"] == "storage_limit_exceeded"
            deleted = await client.delete(f"/v1/files/{made[0]}")
            assert deleted.status_code == 409
            assert error_of(deleted)["code"] == "file_in_use"
            assert (await client.delete(f"/v1/files/{made[1]}")).status_code == 200
            assert (await client.delete(f"/v1/files/{made[1]}")).status_code == 404
        await stage.upload(big)
        await stage.upload(big, K2)


async def test_uploads_at_once_are_bounded(sqlite: Database):
    stage = BatchStage(sqlite)
    release = asyncio.Event()
    reached = asyncio.Semaphore(0)

    async def held() -> AsyncIterator[bytes]:
        yield PURPOSE
        reached.release()
        await release.wait()
        yield form(FILE)

    async with stage.gateway():
        waiting = [asyncio.create_task(send(stage, held())) for _ in range(4)]
        for _ in waiting:
            await reached.acquire()
        refused = await send(stage, form(PURPOSE, FILE))
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        await stage.upload(b"{}", K2)
        release.set()
        assert [each.status_code for each in await asyncio.gather(*waiting)] == [200] * 4
        assert (await send(stage, form(PURPOSE, FILE))).status_code == 200


async def test_pages_go_on_behind_what_was_deleted(database: Database):
    time = FakeTime()
    stage = BatchStage(database, clock=time)
    made = []
    async with stage.gateway():
        for _ in range(5):
            time.now_s += 1
            made.append(await stage.upload(b"{}"))
        first = await stage.get("/v1/files?limit=2")
        assert [each["id"] for each in first["data"]] == made[:2:-1]
        assert first["has_more"]
        async with stage.client() as client:
            assert (await client.delete(f"/v1/files/{first['last_id']}")).status_code == 200
        rest = await stage.get(f"/v1/files?limit=3&after={first['last_id']}")
        assert [each["id"] for each in rest["data"]] == made[2::-1]
        assert not rest["has_more"]
        behind = await stage.get(f"/v1/files?order=asc&after={first_id('file-', 0)}{'0' * 20}")
        assert len(behind["data"]) == 4


async def test_without_a_database_all_of_it_is_unavailable():
    stage = BatchStage(LateDatabase())
    refused = await stage.get("/v1/files")
    assert refused["error"]["code"] == "database_unavailable"
    async with stage.gateway():
        for path in ("/v1/files", f"/v1/files/{first_id('file-', 0)}{'0' * 20}", "/v1/batches"):
            async with stage.client() as client:
                response = await client.get(path)
            assert response.status_code == 503, response.text
            assert error_of(response)["code"] == "database_unavailable"
            assert response.headers["retry-after"]
        response = await send(stage, form(PURPOSE, FILE))
        assert response.status_code == 503


async def test_a_database_that_goes_away_is_said_in_time(sqlite: Database):
    mortal = Mortal(sqlite)
    stage = BatchStage(mortal)

    async def body() -> AsyncIterator[bytes]:
        yield PURPOSE + field("file", b"x" * (PART_BYTES + 10), "f")
        mortal.away = True
        yield form()

    async with stage.gateway():
        response = await send(stage, body())
        assert response.status_code == 503
        mortal.away = False
        batch_id = await stage.begin(lines(2))
        await stage.until(batch_id, "completed")
