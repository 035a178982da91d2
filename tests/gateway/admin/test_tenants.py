"""/admin/tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Table, func, insert, select

from gateway.database.schema import batch_lines, batches, file_parts, files, requests
from tests.gateway.admin.office import Office, open_office
from tests.gateway.database.both import KINDS, Place, place
from tests.gateway.stage import K1, error_of

FULL = {
    "id": "gamma",
    "class": "interactive",
    "weight": 2,
    "models": ["m", "other-*"],
    "limits": {
        "rpm": 600,
        "concurrency": 16,
        "budget_usd": {"amount": "0.5", "per": "day"},
        "models": {"m": {"rpm": 5}},
    },
    "slo": {"ttft_ms": 500, "target": 0.9},
    "cache": {"dram_quota": "256MiB"},
}


@pytest.fixture(params=KINDS)
async def office(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Office]:
    async with open_office(place(request.param, tmp_path, request)) as opened:
        yield opened


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Office]:
    somewhere = Place("sqlite", {"FOREBAY_STATE_DIR": str(tmp_path / "state")})
    async with open_office(somewhere) as opened:
        yield opened


async def test_from_making_to_deleting(office: Office) -> None:
    made = await office.ask("POST", "/admin/tenants", FULL)
    assert made.status_code == 201
    answer = made.json()
    assert (answer["id"], answer["source"], answer["keys"]) == ("gamma", "runtime", 0)
    assert answer["limits"]["budget_usd"] == {"amount": "0.5", "per": "day"}
    assert answer["limits"]["models"]["m"]["rpm"] == 5
    assert answer["cache"]["dram_quota"] == 256 << 20
    assert (answer["class"], answer["slo"]["target"]) == ("interactive", 0.9)
    assert answer["created_at"] == answer["updated_at"] > 1_700_000_000

    key = (await office.ask("POST", "/admin/keys", {"tenant": "gamma"})).json()["key"]
    assert (await office.chat(key)).status_code == 200

    patch = {"weight": 4, "limits": {"rpm": None, "tpm": 9000}, "models": ["none-*"]}
    changed = await office.ask("PATCH", "/admin/tenants/gamma", patch)
    assert changed.status_code == 200
    limits = changed.json()["limits"]
    assert (limits["rpm"], limits["tpm"], limits["concurrency"]) == (None, 9000, 16)
    assert changed.json()["slo"]["ttft_ms"] == 500
    assert (await office.chat(key)).status_code == 404  # the model, at once

    one = await office.ask("GET", "/admin/tenants/gamma")
    assert one.json() == {**changed.json(), "keys": 1}
    every = (await office.ask("GET", "/admin/tenants")).json()["tenants"]
    assert [(each["id"], each["source"]) for each in every] == [
        ("acme", "file"),
        ("gamma", "runtime"),
    ]

    gone = await office.ask("DELETE", "/admin/tenants/gamma")
    assert gone.status_code == 200
    assert gone.json() == {
        "tenant": "gamma",
        "keys_revoked": 1,
        "files": 0,
        "batches": 0,
        "named_prefixes": 0,
        "complete": True,
        "not_covered": [],
        "models": {"m": {"device": 1, "redis": 0}, "org/other": {"device": 0, "redis": 0}},
    }
    assert (await office.chat(key)).status_code == 401
    assert (await office.ask("GET", "/admin/tenants/gamma")).status_code == 404
    assert (await office.ask("DELETE", "/admin/tenants/gamma")).status_code == 404


async def test_deleting_erases_what_was_stored_and_leaves_the_accounts(office: Office) -> None:
    for name in ("gamma", "delta"):
        await office.ask("POST", "/admin/tenants", {"id": name})
        await store(office, name)
    key = (await office.ask("POST", "/admin/keys", {"tenant": "gamma"})).json()["key"]
    await office.chat(key, content="a prompt that is longer than two blocks of sixteen tokens")
    gone = (await office.ask("DELETE", "/admin/tenants/gamma")).json()
    assert (gone["files"], gone["batches"], gone["complete"]) == (2, 2, True)
    assert gone["models"]["m"]["device"] > 0
    left = {
        table.name: await count(office, table)
        for table in (files, file_parts, batches, batch_lines, requests)
    }
    # delta's alone, and both tenants' rows of the ledger
    assert left == {"files": 2, "file_parts": 40, "batches": 2, "batch_lines": 2400, "requests": 2}
    deeds = await office.audit(target="gamma", limit=2)
    assert [(each["action"], each["outcome"]) for each in deeds] == [
        ("tenant.erase", "success"),
        ("tenant.delete", "success"),
    ]
    assert deeds[0]["detail"]["files"] == 2
    assert deeds[1]["detail"] == {"keys_revoked": 1}


async def store(office: Office, tenant: str) -> None:
    """Two files of 20 parts, two batches of 1200 lines, and a row of the ledger."""
    file = {"tenant": tenant, "filename": "f", "purpose": "batch", "bytes": 1, "created_s": 1.0}
    batch = {
        "tenant": tenant,
        "key": "key-1",
        "endpoint": "/v1/completions",
        "input_file": "file-1",
        "window_s": 1.0,
        "status": "in_progress",
        "created_s": 1.0,
        "expires_s": 2.0,
    }
    row = {column.name: column.type.python_type() for column in requests.columns}
    async with office.database.begin() as connection:
        for number in (1, 2):
            name = f"{tenant}-{number}"
            await connection.execute(insert(files).values(id=f"file-{name}", **file))
            parts = [{"file": f"file-{name}", "part": p, "content": b"x"} for p in range(20)]
            await connection.execute(insert(file_parts), parts)
            await connection.execute(insert(batches).values(id=f"batch-{name}", **batch))
            lines = [
                {
                    "batch": f"batch-{name}",
                    "line": line,
                    "custom_id": str(line),
                    "state": "pending",
                    "body": "{}",
                }
                for line in range(1200)
            ]
            await connection.execute(insert(batch_lines), lines)
        await connection.execute(insert(requests), [{**row, "id": tenant, "tenant": tenant}])


async def count(office: Office, table: Table) -> int:
    async with office.database.read() as connection:
        return await connection.scalar(select(func.count()).select_from(table)) or 0


async def test_what_could_not_be_erased_is_said_and_can_be_asked_for_again(sqlite: Office) -> None:
    await sqlite.ask("POST", "/admin/tenants", {"id": "gamma"})
    sqlite.stage.replica.redis_answers = False
    partly = await sqlite.ask("DELETE", "/admin/tenants/gamma")
    assert partly.status_code == 503
    assert partly.json()["complete"] is False
    assert "Ask again with ?unknown=allow" in partly.json()["error"]["message"]
    assert (await sqlite.audit(limit=1))[0]["outcome"] == "failed"
    sqlite.stage.replica.redis_answers = True
    again = await sqlite.ask("DELETE", "/admin/tenants/gamma?unknown=allow")
    assert (again.status_code, again.json()["complete"]) == (200, True)


WRONG_BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "id"),
    ({"id": "a/b"}, "id"),
    ({"id": "g", "keys": [{"env": "X"}]}, "keys"),
    ({"id": "g", "limits": {"rpm": "lots"}}, "limits.rpm"),
    ({"id": "g", "limits": {"models": {"m": {"tpm": 0}}}}, "limits.models.m.tpm"),
    ({"id": "g", "limits": {"budget_usd": {"amount": -1}}}, "limits.budget_usd.amount"),
    ({"id": "g", "class": "royal"}, "class"),
    ({"id": "g", "colour": "blue"}, "colour"),
    ({"id": "g", "sk-forebay-secret0123": 1}, "(a key that is not a plain word)"),
    ({"id": "g", "slo": {"on_overload": "downgrade"}}, "slo"),
    ({"id": "g", "slo": {"on_overload": "downgrade", "downgrade_to": "x"}}, "slo.downgrade_to"),
    ({"id": "g", "cache": {"dram_floor": "1GiB"}}, "cache"),
    ({"id": "g", "weight": 0}, "weight"),
]


async def test_a_wrong_body_names_its_field_and_not_its_value(sqlite: Office) -> None:
    for body, param in WRONG_BODIES:
        response = await sqlite.ask("POST", "/admin/tenants", body)
        assert (response.status_code, error_of(response)["param"]) == (400, param), body
        assert "secret0123" not in response.text
        assert "lots" not in response.text
    assert (await sqlite.ask("GET", "/admin/tenants/g")).status_code == 404


WRONG_CHANGES: list[tuple[str, object, int, str | None]] = [
    ("/admin/tenants/acme", {"weight": 2}, 409, "tenant_in_file"),
    ("/admin/tenants/nobody", {"weight": 2}, 404, "tenant_not_found"),
    ("/admin/tenants/a%00b", {"weight": 2}, 404, "tenant_not_found"),
    ("/admin/tenants/gamma", {"id": "other"}, 400, None),
    ("/admin/tenants/gamma", {"keys": []}, 400, None),
    ("/admin/tenants/gamma", {"limits": 5}, 400, None),
    ("/admin/tenants/gamma", {}, 400, None),
    ("/admin/tenants/gamma", [], 400, None),
]


async def test_what_cannot_be_changed(sqlite: Office) -> None:
    made = await sqlite.ask("POST", "/admin/tenants", {"id": "gamma"})
    for path, body, status, code in WRONG_CHANGES:
        response = await sqlite.ask("PATCH", path, body)
        assert (response.status_code, error_of(response)["code"]) == (status, code), (path, body)
    assert (await sqlite.ask("GET", "/admin/tenants/gamma")).json() == made.json()


async def test_two_of_one_name_and_the_files(sqlite: Office) -> None:
    assert (await sqlite.ask("POST", "/admin/tenants", {"id": "gamma"})).status_code == 201
    again = await sqlite.ask("POST", "/admin/tenants", {"id": "gamma"})
    assert (again.status_code, error_of(again)["code"]) == (409, "tenant_exists")
    of_file = await sqlite.ask("POST", "/admin/tenants", {"id": "acme"})
    assert (of_file.status_code, error_of(of_file)["code"]) == (409, "tenant_in_file")
    assert (await sqlite.ask("DELETE", "/admin/tenants/acme")).status_code == 409
    assert (await sqlite.chat(K1)).status_code == 200


async def test_metrics_know_a_tenant_that_was_made(sqlite: Office) -> None:
    await sqlite.ask("POST", "/admin/tenants", {"id": "gamma"})
    key = (await sqlite.ask("POST", "/admin/keys", {"tenant": "gamma"})).json()["key"]
    assert (await sqlite.chat(key)).status_code == 200
    assert sqlite.stage.metric("forebay_requests_total", tenant="gamma") == 1
    stats = sqlite.registry.stats(sqlite.trail)
    assert (stats.tenants, stats.keys, stats.not_in_use, stats.audit_rows_lost) == (1, 1, 0, 0)
    assert 0 <= stats.stale_s < 5
