"""/admin/keys."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.admin.office import Office, open_office
from tests.gateway.database.both import Place
from tests.gateway.stage import K1, error_of


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    somewhere = Place("sqlite", {"FOREBAY_STATE_DIR": str(tmp_path / "state")})
    async with open_office(somewhere) as opened:
        yield opened


async def issue(office: Office, **fields: Any) -> dict[str, Any]:
    response = await office.ask("POST", "/admin/keys", {"tenant": "acme", **fields})
    assert response.status_code == 201, response.text
    assert response.headers["cache-control"] == "no-store"
    made: dict[str, Any] = response.json()
    return made


async def test_a_key_is_shown_once_and_then_only_its_id(office: Office) -> None:
    limits = {"rpm": 5, "budget_usd": {"amount": 2.5}}
    made = await issue(office, name="ci", limits=limits, expires_in="30d")
    plain = made.pop("key")
    assert plain.startswith("sk-forebay-")
    assert (await office.chat(plain)).status_code == 200
    assert made == {
        "id": made["id"],
        "tenant": "acme",
        "name": "ci",
        "source": "runtime",
        "state": "active",
        "limits": {"rpm": 5, "budget_usd": {"amount": "2.5", "per": "month"}},
        "created_at": made["created_at"],
        "expires_at": made["created_at"] + 30 * 86_400,
        "revoked_at": None,
        "replaced_by": None,
        "problem": None,
    }
    listed = await office.ask("GET", "/admin/keys", params={"tenant": "acme"})
    assert [each for each in listed.json()["keys"] if each["source"] == "runtime"] == [made]
    [of_file] = [each for each in listed.json()["keys"] if each["source"] == "file"]
    assert (await office.ask("GET", f"/admin/keys/{of_file['id']}")).json() == of_file
    assert (await office.ask("GET", f"/admin/keys/{made['id']}")).json() == made
    everything = listed.text + (await office.ask("GET", "/admin/audit")).text
    assert plain not in everything
    assert "sha256" not in everything


async def test_listed_by_tenant(office: Office) -> None:
    await office.ask("POST", "/admin/tenants", {"id": "gamma"})
    made = [await issue(office, tenant=name) for name in ("gamma", "acme", "gamma")]
    listed = await office.ask("GET", "/admin/keys", params={"tenant": "gamma"})
    assert [each["id"] for each in listed.json()["keys"]] == [made[0]["id"], made[2]["id"]]
    assert len((await office.ask("GET", "/admin/keys")).json()["keys"]) == 5  # with two of the file
    none = await office.ask("GET", "/admin/keys", params={"tenant": "a/b"})
    assert none.status_code == 404


async def test_rotating_revoking_and_changing(office: Office) -> None:
    old = await issue(office, name="ci", limits={"rpm": 5})
    rotated = await office.ask("POST", f"/admin/keys/{old['id']}/rotate")
    new = rotated.json()
    assert (rotated.status_code, new["replaces"], new["name"]) == (201, old["id"], "ci")
    assert new["limits"] == {"rpm": 5}
    for key in (old, new):
        assert (await office.chat(key["key"])).status_code == 200
    shown = (await office.ask("GET", f"/admin/keys/{old['id']}")).json()
    assert shown["replaced_by"] == new["id"]
    assert shown["expires_at"] == pytest.approx(time.time() + 86_400, abs=5)
    again = await office.ask("POST", f"/admin/keys/{old['id']}/rotate", {"grace_s": 0})
    assert (again.status_code, error_of(again)["code"]) == (409, "key_replaced")

    at_once = await office.ask("POST", f"/admin/keys/{new['id']}/rotate", {"grace_s": "0s"})
    last = at_once.json()
    assert (await office.chat(new["key"])).status_code == 401
    assert (await office.chat(last["key"])).status_code == 200

    path = f"/admin/keys/{last['id']}"
    changed = await office.ask("PATCH", path, {"name": "other", "limits": {"tpm": 7}})
    assert (changed.json()["name"], changed.json()["limits"]) == ("other", {"tpm": 7})
    ends = await office.ask("PATCH", path, {"expires_at": "2099-01-01T00:00:00Z"})
    assert (ends.json()["expires_at"], ends.json()["name"]) == (4_070_908_800, "other")
    assert (await office.ask("PATCH", path, {"expires_at": None})).json()["expires_at"] is None

    revoked = await office.ask("DELETE", path)
    assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    assert (await office.chat(last["key"])).status_code == 401
    assert (await office.ask("DELETE", path)).json() == revoked.json()
    assert (await office.ask("PATCH", path, {"name": "x"})).status_code == 409
    assert (await office.ask("POST", path + "/rotate")).status_code == 409


WRONG_KEYS: list[tuple[dict[str, Any], int, str | None]] = [
    ({}, 400, "tenant"),
    ({"tenant": "nobody"}, 404, "tenant"),
    ({"tenant": "a\0b"}, 400, "tenant"),
    ({"tenant": "acme", "name": "x" * 129}, 400, "name"),
    ({"tenant": "acme", "name": "a\0b"}, 400, "name"),
    ({"tenant": "acme", "expires_in": "soon"}, 400, "expires_in"),
    ({"tenant": "acme", "expires_in": 0}, 400, "expires_in"),
    ({"tenant": "acme", "expires_at": 5}, 400, "expires_at"),
    ({"tenant": "acme", "expires_at": "2026-01-01T00:00:00"}, 400, "expires_at"),
    ({"tenant": "acme", "expires_at": 1e300}, 400, "expires_at"),
    ({"tenant": "acme", "expires_at": 4e9, "expires_in": 5}, 400, None),
    ({"tenant": "acme", "limits": {"rpm": 0}}, 400, "limits.rpm"),
    ({"tenant": "acme", "limits": {"cached_weight": 1}}, 400, "limits.cached_weight"),
    ({"tenant": "acme", "hash": "sha256:00"}, 400, "hash"),
]


async def test_what_cannot_be_made(office: Office) -> None:
    for body, status, param in WRONG_KEYS:
        response = await office.ask("POST", "/admin/keys", body)
        assert (response.status_code, error_of(response)["param"]) == (status, param), body
    assert [each["source"] for each in (await office.ask("GET", "/admin/keys")).json()["keys"]] == [
        "file",
        "file",
    ]


async def test_what_is_not_there_and_what_is_the_files(office: Office) -> None:
    for method, path in (
        ("GET", "/admin/keys/key-0"),
        ("DELETE", "/admin/keys/key-0"),
        ("POST", "/admin/keys/key-0/rotate"),
        ("PATCH", "/admin/keys/key-0"),
    ):
        response = await office.ask(method, path, None if method == "GET" else {"name": "x"})
        if method == "POST":
            response = await office.ask(method, path)
        assert response.status_code == 404, path
        assert error_of(response)["code"] == "key_not_found"
    assert (await office.ask("PATCH", "/admin/keys/key-0", {})).status_code == 400
    keys = (await office.ask("GET", "/admin/keys")).json()["keys"]
    [of_file] = [each for each in keys if each["tenant"] == "acme"]
    revoked = await office.ask("DELETE", f"/admin/keys/{of_file['id']}")
    assert (revoked.status_code, error_of(revoked)["code"]) == (409, "key_in_file")
    assert (await office.chat(K1)).status_code == 200


async def test_a_tenant_may_not(office: Office) -> None:
    made = await issue(office)
    for method, path in (
        ("GET", "/admin/keys"),
        ("POST", "/admin/keys"),
        ("GET", "/admin/tenants"),
        ("DELETE", f"/admin/keys/{made['id']}"),
        ("GET", "/admin/audit"),
    ):
        assert (await office.ask(method, path, key=made["key"])).status_code == 401
    assert (await office.chat(made["key"])).status_code == 200
