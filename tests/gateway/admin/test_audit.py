"""What operators do is written down, whatever it is, and by whom; what others try is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from gateway.admin.auth import operator_id
from tests.gateway.admin.office import Office, open_office
from tests.gateway.database.both import KINDS, Place, place
from tests.gateway.stage import ADMIN, K1, SECRET, Stage, error_of

ACTIONS = [
    ("POST", "/admin/tenants", {"id": "gamma"}, "tenant.create", "gamma"),
    ("PATCH", "/admin/tenants/gamma", {"weight": 2}, "tenant.update", "gamma"),
    ("POST", "/admin/cache/flush?model=m", None, "cache.flush", ""),
    ("DELETE", "/admin/tenants/acme/cache", None, "cache.erase", "acme"),
    ("POST", "/admin/replicas", {"model": "m"}, "replica.add", "fake/0"),
    ("POST", "/admin/replicas/fake/0/drain", None, "replica.drain", "fake/0"),
    ("POST", "/admin/replicas/fake/0/resume", None, "replica.resume", "fake/0"),
    ("DELETE", "/admin/replicas/fake/0?drain_s=1", None, "replica.remove", "fake/0"),
]


@pytest.fixture(params=KINDS)
async def office(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Office]:
    async with open_office(place(request.param, tmp_path, request)) as opened:
        yield opened


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Office]:
    somewhere = Place("sqlite", {"FOREBAY_STATE_DIR": str(tmp_path / "state")})
    async with open_office(somewhere) as opened:
        yield opened


async def test_every_action_leaves_one_row(office: Office) -> None:
    for method, path, body, _, _ in ACTIONS:
        response = await office.ask(method, path, body, headers={"x-request-id": "req-of-test"})
        assert response.status_code < 300, (path, response.text)
    made = (await office.ask("POST", "/admin/keys", {"tenant": "gamma"})).json()
    new = (await office.ask("POST", f"/admin/keys/{made['id']}/rotate")).json()
    await office.ask("PATCH", f"/admin/keys/{new['id']}", {"name": "x"})
    await office.ask("DELETE", f"/admin/keys/{new['id']}")
    rows = (await office.audit())[::-1]
    assert [(row["action"], row["target"]) for row in rows] == [
        *((action, target) for *_, action, target in ACTIONS),
        ("key.create", made["id"]),
        ("key.rotate", made["id"]),
        ("key.update", new["id"]),
        ("key.revoke", new["id"]),
    ]
    assert {row["outcome"] for row in rows} == {"success"}
    assert {row["client"] for row in rows} == {"127.0.0.1"}
    assert rows[0]["request_id"] == "req-of-test"
    [actor] = {row["actor"] for row in rows}
    assert actor == operator_id(SECRET, office.runtime.current)
    everything = str(rows)
    for secret in (ADMIN, made["key"], new["key"]):
        assert secret not in everything
    assert rows[1]["detail"] == {"settings": {"weight": 2.0}}
    assert rows[4]["detail"] == {"model": "m", "remote": False}


async def test_what_is_refused_or_fails_is_written_down_too(sqlite: Office) -> None:
    await sqlite.ask("POST", "/admin/tenants", {"id": "acme"})
    await sqlite.ask("POST", "/admin/tenants", {"id": "g", "weight": "sk-forebay-0123456789"})
    await sqlite.ask("DELETE", "/admin/replicas/nothing")
    sqlite.stage.replica.redis_answers = False
    await sqlite.ask("POST", "/admin/cache/flush")
    rows = (await sqlite.audit())[::-1]
    assert [(row["action"], row["outcome"], row["detail"].get("error")) for row in rows] == [
        ("tenant.create", "refused", "tenant_in_file"),
        ("tenant.create", "refused", "400"),
        ("replica.remove", "refused", "replica_not_found"),
        ("cache.flush", "failed", None),
    ]
    assert "0123456789" not in str(rows)


async def test_looking_and_trying_without_the_key_leave_nothing(sqlite: Office) -> None:
    for method, path, body, *_ in ACTIONS:
        for key in (None, "wrong", K1):
            assert (await sqlite.ask(method, path, body, key=key)).status_code == 401
    for path in ("/admin/tenants", "/admin/keys", "/admin/cache", "/admin/replicas"):
        assert (await sqlite.ask("GET", path)).status_code == 200
    await sqlite.ask("POST", "/admin/route/explain", {})
    assert await sqlite.audit() == []


async def test_an_erased_user_is_named_nowhere(sqlite: Office, tmp_path: Path) -> None:
    path = "/admin/tenants/acme/users/ann-of-sales/cache"
    assert (await sqlite.ask("DELETE", path)).status_code == 409  # acme's users share
    await sqlite.ask("DELETE", "/admin/tenants/acme/cache?user=ann-of-sales")
    rows = await sqlite.audit()
    assert [row["action"] for row in rows] == ["cache.erase", "cache.erase_user"]
    assert rows[0]["detail"]["one_user"] is True
    files = b"".join(path.read_bytes() for path in (tmp_path / "state").iterdir())
    assert b"ann-of-sales" not in files


async def test_paged_and_filtered(sqlite: Office) -> None:
    for number in range(5):
        await sqlite.ask("POST", "/admin/tenants", {"id": f"t{number}"})
    await sqlite.ask("POST", "/admin/keys", {"tenant": "t1"})
    seen = []
    params: dict[str, object] = {"limit": 4}
    while True:
        page = (await sqlite.ask("GET", "/admin/audit", params=params)).json()
        seen += page["entries"]
        if page["next"] is None:
            break
        params["before"] = page["next"]
    assert [row["id"] for row in seen] == sorted((row["id"] for row in seen), reverse=True)
    assert len(seen) == 6
    assert [row["target"] for row in await sqlite.audit(target="t3")] == ["t3"]
    assert len(await sqlite.audit(action="tenant")) == 5
    assert len(await sqlite.audit(action="tenant.create")) == 5
    assert len(await sqlite.audit(action="ten")) == 0
    assert len(await sqlite.audit(action="%")) == 0
    moment = seen[2]["at"]
    assert [row["id"] for row in await sqlite.audit(since=moment)] == [
        row["id"] for row in seen if row["at"] >= moment
    ]
    assert await sqlite.audit(until="2020-01-01T00:00:00Z") == []
    assert len(await sqlite.audit(actor=seen[0]["actor"])) == 6


async def test_a_wrong_question_names_its_field(sqlite: Office) -> None:
    for wrong in ("limit=0", "limit=1001", "before=x", "since=now", "until=-1", "target=a%00b"):
        response = await sqlite.ask("GET", f"/admin/audit?{wrong}")
        assert response.status_code == 400
        assert error_of(response)["param"] == wrong.partition("=")[0]


async def test_without_a_database_the_rest_goes_on_and_the_log_has_the_row() -> None:
    office = Office(Stage())
    with structlog.testing.capture_logs() as logs:
        resumed = await office.ask("POST", "/admin/replicas/fake/0/resume")
        assert resumed.json()["condition"] == "serving"
        refused = await office.ask("POST", "/admin/tenants", {"id": "gamma"})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "database_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
    lost = [entry for entry in logs if entry["event"].startswith("audit row lost")]
    assert [(entry["action"], entry["outcome"], entry["log_level"]) for entry in lost] == [
        ("replica.resume", "success", "error"),
        ("tenant.create", "failed", "error"),
    ]
    assert office.trail.lost == 2
    for path in ("/admin/audit", "/admin/keys", "/admin/tenants", "/admin/keys/key-1"):
        assert (await office.ask("GET", path)).status_code == 503
    assert (await office.ask("GET", "/admin/tenants/acme")).status_code == 200  # the file's
    assert (await office.chat(K1)).status_code == 200


async def test_a_broken_handler_is_a_failed_deed(
    sqlite: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admin.cache._missed", lambda _: 1 / 0)
    response = await sqlite.ask("POST", "/admin/cache/flush")
    assert response.status_code == 500
    assert [(row["action"], row["outcome"]) for row in await sqlite.audit()] == [
        ("cache.flush", "failed")
    ]
