"""Tenants and keys made at run time: in use at once here, soon elsewhere, never in the clear."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import structlog
from sqlalchemy import insert, text, update

from gateway.database.opening import LateDatabase
from gateway.database.schema import keys, tenants
from gateway.errors import ApiError
from gateway.registry.registry import NewKey, Registry
from gateway.reload import RuntimeConfig
from gateway.settings_tenants import LimitSettings
from policies.limits import Limits
from tests.gateway.database.both import KINDS, Place, everything, place
from tests.gateway.registry.gateways import (
    FILE_KEY,
    Gateway,
    deed,
    following,
    snapshot,
    tenant,
    two_gateways,
    until,
)
from tests.postgres import Postgres


@pytest.fixture(params=KINDS)
def somewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place(request.param, tmp_path, request)


@pytest.fixture
def sqlite(tmp_path: Path) -> Place:
    return Place("sqlite", {"FOREBAY_STATE_DIR": str(tmp_path / "state")})


async def test_a_key_is_good_at_once_and_revoked_everywhere_within_two_seconds(
    somewhere: Place,
) -> None:
    async with (
        somewhere.open() as first,
        somewhere.open() as second,
        following(first) as one,
        following(second, poll_s=0.5) as other,  # as in production
    ):
        await one.registry.create_tenant(tenant("beta", weight=3), deed())
        made = await one.registry.create_key("beta", deed(), limits=LimitSettings(rpm=5))
        assert one.who(made.plain) == "beta"
        await until(lambda: other.admits(made.plain), within_s=1.5)
        caller = other.runtime.current.key_ring.identify(f"Bearer {made.plain}")
        assert (caller.tenant.weight, caller.key.id) == (3, made.record.id)
        assert caller.key.limits == Limits(rpm=5)
        assert other.runtime.current.key_ring.caller(made.record.id) == caller

        began = time.monotonic()
        await one.registry.revoke_key(made.record.id, deed())
        assert not one.admits(made.plain)
        await until(lambda: not other.admits(made.plain))
        assert time.monotonic() - began < 2
        assert other.admits(FILE_KEY)
        assert other.runtime.current.key_ring.caller(made.record.id) is None


async def test_what_was_made_is_there_after_a_restart(somewhere: Place) -> None:
    async with somewhere.open() as database, following(database) as gateway:
        await gateway.registry.create_tenant(
            tenant("beta", limits={"rpm": 7, "budget_usd": {"amount": "0.1"}}), deed()
        )
        of_beta = await gateway.registry.create_key("beta", deed())
        of_file = await gateway.registry.create_key("acme", deed(), name="ci")
    async with somewhere.open() as database, following(database) as gateway:
        assert (gateway.who(of_beta.plain), gateway.who(of_file.plain)) == ("beta", "acme")
        beta = gateway.runtime.current.key_ring.tenant("beta")
        assert beta is not None
        assert (beta.limits.rpm, beta.limits.budget_nusd) == (7, 100_000_000)
        assert gateway.known == {"acme", "beta"}


async def test_tenants_are_followed_and_keys_alone_are_not(sqlite: Place) -> None:
    async with two_gateways(sqlite) as (one, other):
        before = other.runtime.current.settings
        made = await one.registry.create_key("acme", deed())
        await until(lambda: other.admits(made.plain))
        assert other.runtime.current.settings is before
        assert (one.followed, other.followed) == ([], [])
        await one.registry.create_tenant(tenant("beta"), deed())
        await until(lambda: other.followed == [2])
        assert one.followed == [2]
        await one.registry.change_tenant("beta", lambda _: tenant("beta", weight=9), deed())
        await until(lambda: other.followed == [2, 2])
        assert other.runtime.current.settings.tenants[1].weight == 9


async def test_a_deleted_tenant_is_erased_by_the_other_gateways_too(sqlite: Place) -> None:
    async with two_gateways(sqlite) as (one, other):
        await one.registry.create_tenant(tenant("beta"), deed())
        made = await one.registry.create_key("beta", deed())
        await until(lambda: other.admits(made.plain))
        assert await one.registry.delete_tenant("beta", deed(), unknown=False) == 1
        await until(lambda: other.gone == ["beta"])
        assert one.gone == []  # who was asked sees to that itself
        assert not one.admits(made.plain)
        assert not other.admits(made.plain)
        with pytest.raises(ApiError) as caught:
            await one.registry.delete_tenant("beta", deed(), unknown=False)
        assert caught.value.status == 404
        assert await one.registry.delete_tenant("beta", deed(), unknown=True) == 0


async def test_rotating_gives_the_old_key_its_grace_and_no_more(sqlite: Place) -> None:
    async with sqlite.open() as database, following(database) as gateway:
        registry = gateway.registry
        ends_s = time.time() + 1000
        old = await registry.create_key(
            "acme", deed(), name="ci", expires_s=ends_s, limits=LimitSettings(rpm=5)
        )
        new = await registry.rotate_key(old.record.id, deed(), grace_s=1.0, lifetime_s=None)
        assert gateway.admits(old.plain)
        assert gateway.admits(new.plain)
        await until(lambda: not gateway.admits(old.plain))
        assert gateway.admits(new.plain)
        assert (new.record.name, new.record.limits.rpm) == ("ci", 5)
        assert new.record.expires_s == pytest.approx(time.time() + 1000, abs=5)  # as long again
        replaced = await registry.key(old.record.id)
        assert replaced.replaced_by == new.record.id
        for key_id, code in ((old.record.id, "key_expired"), ("key-nothing", "key_not_found")):
            with pytest.raises(ApiError) as caught:
                await registry.rotate_key(key_id, deed(), grace_s=9, lifetime_s=None)
            assert caught.value.code == code


async def test_a_key_that_was_replaced_cannot_be_brought_back(sqlite: Place) -> None:
    async with sqlite.open() as database, following(database) as gateway:
        registry = gateway.registry
        old = await registry.create_key("acme", deed())
        await registry.rotate_key(old.record.id, deed(), grace_s=60, lifetime_s=None)
        for later in (None, time.time() + 1000):
            with pytest.raises(ApiError) as caught:
                await registry.change_key(old.record.id, deed(), expires=(later,))
            assert (caught.value.status, caught.value.code) == (409, "key_replaced")
        await registry.change_key(old.record.id, deed(), expires=(time.time() - 1,))
        assert not gateway.admits(old.plain)


async def test_a_grace_is_never_longer_than_the_key_had_left(sqlite: Place) -> None:
    async with sqlite.open() as database, following(database) as gateway:
        registry = gateway.registry
        ends_s = time.time() + 10
        old = await registry.create_key("acme", deed(), expires_s=ends_s)
        new = await registry.rotate_key(old.record.id, deed(), grace_s=1e5, lifetime_s=60)
        assert (await registry.key(old.record.id)).expires_s == pytest.approx(ends_s)
        assert new.record.expires_s == pytest.approx(time.time() + 60, abs=5)


async def test_of_many_who_rotate_a_key_at_once_one_does(somewhere: Place) -> None:
    async with two_gateways(somewhere) as (one, other):
        old = await one.registry.create_key("acme", deed())

        rotations = (
            gateway.registry.rotate_key(old.record.id, deed(), grace_s=60, lifetime_s=None)
            for gateway in (one, other) * 4
        )
        results = await asyncio.gather(*rotations, return_exceptions=True)
        [new] = [each for each in results if isinstance(each, NewKey)]
        refusals = [each for each in results if isinstance(each, ApiError)]
        assert [refusal.code for refusal in refusals] == ["key_replaced"] * 7
        assert len(await one.registry.keys("acme")) == 2
        await until(lambda: one.admits(new.plain) and other.admits(new.plain))


async def test_of_many_who_make_a_tenant_at_once_one_does(somewhere: Place) -> None:
    async with two_gateways(somewhere) as (one, other):

        async def create(gateway: Gateway) -> int:
            try:
                await gateway.registry.create_tenant(tenant("beta"), deed())
            except ApiError as refusal:
                return refusal.status
            return 201

        statuses = await asyncio.gather(*(create(each) for each in (one, other) * 3))
        assert sorted(statuses) == [201, 409, 409, 409, 409, 409]


async def test_a_key_changes_and_stays_revoked_once_it_is(sqlite: Place) -> None:
    async with sqlite.open() as database, following(database) as gateway:
        registry = gateway.registry
        made = await registry.create_key("acme", deed())
        key_id = made.record.id
        await registry.change_key(key_id, deed(), name="ci", limits=LimitSettings(tpm=9))
        await registry.change_key(key_id, deed(), expires=(time.time() + 0.2,))
        changed = await registry.key(key_id)
        assert (changed.name, changed.limits.tpm) == ("ci", 9)
        await until(lambda: not gateway.admits(made.plain))
        await registry.change_key(key_id, deed(), expires=(None,))
        assert gateway.admits(made.plain)
        first = await registry.revoke_key(key_id, deed())
        again = await registry.revoke_key(key_id, deed())
        assert first.revoked_s == again.revoked_s is not None
        with pytest.raises(ApiError) as caught:
            await registry.change_key(key_id, deed(), expires=(None,))
        assert caught.value.code == "key_revoked"
        assert not gateway.admits(made.plain)


async def test_the_file_is_changed_in_the_file(sqlite: Place) -> None:
    async with sqlite.open() as database, following(database) as gateway:
        [file_key] = gateway.runtime.file.key_ring.callers
        registry = gateway.registry
        for change in (
            registry.create_tenant(tenant("acme"), deed()),
            registry.change_tenant("acme", lambda _: tenant("acme"), deed()),
            registry.delete_tenant("acme", deed(), unknown=True),
            registry.revoke_key(file_key, deed()),
            registry.change_key(file_key, deed(), name="x"),
            registry.rotate_key(file_key, deed(), grace_s=0, lifetime_s=None),
        ):
            with pytest.raises(ApiError) as caught:
                await change
            assert caught.value.status == 409
            assert "configuration file" in caught.value.message
        assert gateway.admits(FILE_KEY)


async def test_what_does_not_fit_the_others_is_refused(sqlite: Place) -> None:
    file = snapshot({"id": "acme", "cache": {"dram_floor": "3MiB"}}, cache={"dram": "10MiB"})
    async with sqlite.open() as database, following(database, file) as gateway:
        registry = gateway.registry
        await registry.create_tenant(tenant("beta", cache={"dram_floor": "2MiB"}), deed())
        for settings, param in (
            (tenant("gamma", cache={"dram_floor": 1}), "cache"),
            (
                tenant("gamma", slo={"on_overload": "downgrade", "downgrade_to": "n"}),
                "slo.downgrade_to",
            ),
        ):
            with pytest.raises(ApiError) as caught:
                await registry.create_tenant(settings, deed())
            assert (caught.value.status, caught.value.param) == (400, param)
        # its own floor does not stand in its way
        await registry.change_tenant(
            "beta", lambda _: tenant("beta", cache={"dram_floor": "1MiB"}), deed()
        )


async def test_an_audit_row_and_its_change_are_there_together_or_not(somewhere: Place) -> None:
    async with somewhere.open() as database, following(database) as gateway:
        made = deed("tenant.create")
        await gateway.registry.create_tenant(tenant("beta"), made)
        assert made.written
        refused = deed("tenant.create")
        with pytest.raises(ApiError):
            await gateway.registry.create_tenant(tenant("beta"), refused)
        assert not refused.written
        async with database.begin() as connection:
            await connection.execute(text("ALTER TABLE audit RENAME TO audit_away"))
        with pytest.raises(ApiError) as caught:
            await gateway.registry.create_tenant(tenant("gamma"), deed())
        assert (caught.value.status, caught.value.code) == (503, "database_unavailable")
        assert int(caught.value.headers["retry-after"]) >= 1
        async with database.begin() as connection:
            await connection.execute(text("ALTER TABLE audit_away RENAME TO audit"))
        assert {each.id for each in await gateway.registry.tenants()} == {"beta"}
        assert (await everything(database)).count("tenant.create") == 1


async def test_a_plain_key_is_nowhere(sqlite: Place, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with sqlite.open() as database, following(database) as gateway:
            registry = gateway.registry
            made = await registry.create_key("acme", deed(), name="ci")
            new = await registry.rotate_key(made.record.id, deed(), grace_s=60, lifetime_s=None)
            await registry.change_key(new.record.id, deed(), name="other")
            await registry.revoke_key(made.record.id, deed())
            rows = await everything(database)
            shown = f"{made!r} {new.record!r} {await registry.keys(None)!r} {rows} {logs!r}"
            files = b"".join(path.read_bytes() for path in (tmp_path / "state").iterdir())
    for secret in (made.plain, new.plain):
        assert secret not in shown
        assert secret.removeprefix("sk-forebay-")[:20] not in shown
        assert secret.encode() not in files
    assert made.record.hashed not in f"{made!r}"
    assert rows.count("key.") == 0  # the deeds of these tests are all "test.do"
    assert rows.count("test.do") == 4


async def test_a_database_that_goes_away_leaves_the_keys_and_comes_back(
    postgres: Postgres, postgres_url: str
) -> None:
    async with two_gateways(Place(postgres_url, {})) as (one, other):
        made = await one.registry.create_key("acme", deed())
        await until(lambda: other.admits(made.plain))
        postgres.stop()
        try:
            with structlog.testing.capture_logs() as logs:
                await until(lambda: other.registry._follower.stale_s > 0.3)
                assert other.admits(made.plain)
                assert one.admits(FILE_KEY)
                with pytest.raises(ApiError) as caught:
                    await one.registry.revoke_key(made.record.id, deed())
                assert caught.value.status == 503
                with pytest.raises(ApiError):
                    await one.registry.keys(None)
            told = [entry for entry in logs if "stay as last known" in entry["event"]]
            assert len(told) == 2  # each gateway once
        finally:
            postgres.start()
        await one.registry.revoke_key(made.record.id, deed())
        await until(lambda: not other.admits(made.plain))
        await until(lambda: other.registry._follower.stale_s < 0.3)


async def test_a_bug_in_looking_does_not_end_the_watch(
    sqlite: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_gateways(sqlite) as (one, other):
        with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
            patched.setattr(other.registry._follower, "_look", lambda: 1 / 0)
            await until(lambda: any("could not be looked at" in each["event"] for each in logs))
        made = await one.registry.create_key("acme", deed())
        await until(lambda: other.admits(made.plain))


async def test_what_this_version_cannot_read_is_left_out_and_said(sqlite: Place) -> None:
    row = {"created_s": 1.0, "updated_s": 1.0}
    async with sqlite.open() as database:
        async with following(database) as gateway:
            made = await gateway.registry.create_key("acme", deed())
            other = await gateway.registry.create_key("acme", deed())
        async with database.begin() as connection:
            await connection.execute(
                insert(tenants).values(id="odd", settings='{"colour": "blue"}', **row)
            )
            await connection.execute(
                update(keys).where(keys.c.id == made.record.id).values(limits='{"rpm": "lots"}')
            )
        with structlog.testing.capture_logs() as logs:
            async with following(database) as gateway:
                assert gateway.runtime.problems.keys() == {"odd", made.record.id}
                assert gateway.admits(other.plain)
                assert not gateway.admits(made.plain)  # who may have been given little
                await gateway.registry.change_key(made.record.id, deed(), name="kept")
                await gateway.registry.revoke_key(made.record.id, deed())
                assert gateway.runtime.problems.keys() == {"odd"}
        said = {entry["what"] for entry in logs if entry["event"].endswith("not in use")}
        assert said == {"odd", made.record.id}
        assert '{"rpm": "lots"}' in await everything_of(sqlite)


@pytest.mark.parametrize(
    ("settings", "limits", "hashed"),
    [("{", "{}", ""), ("[7]", "{}", ""), ("{}", "{", ""), ("{}", "{}", "no-hash")],
)
async def test_a_row_that_somebody_has_spoilt_puts_out_no_other(
    sqlite: Place, settings: str, limits: str, hashed: str
) -> None:
    async with sqlite.open() as database:
        async with following(database) as gateway:
            await gateway.registry.create_tenant(tenant("spoilt"), deed())
            made = await gateway.registry.create_key("spoilt", deed())
            other = await gateway.registry.create_key("acme", deed())
        async with database.begin() as connection:
            await connection.execute(update(tenants).values(settings=settings))
            spoilt = {"limits": limits, "hash": hashed or made.record.hashed}
            await connection.execute(
                update(keys).where(keys.c.id == made.record.id).values(**spoilt)
            )
        async with following(database) as gateway:
            assert gateway.admits(other.plain)
            assert not gateway.admits(made.plain)
            assert made.record.id in gateway.runtime.problems


async def test_what_a_later_version_has_changed_is_not_taken_for_deleted(sqlite: Place) -> None:
    async with two_gateways(sqlite) as (one, other):
        await one.registry.create_tenant(tenant("beta"), deed())
        await until(lambda: other.runtime.current.key_ring.tenant("beta") is not None)
        async with one.registry._database.begin() as connection:
            await connection.execute(update(tenants).values(settings='{"colour": "blue"}'))
        await one.registry.create_key("acme", deed())
        await until(lambda: other.runtime.problems.keys() == {"beta"})
        assert other.runtime.current.key_ring.tenant("beta") is None
        assert (one.gone, other.gone) == ([], [])


async def everything_of(somewhere: Place) -> str:
    async with somewhere.open() as database:
        return await everything(database)


async def test_before_the_database_is_open_nothing_can_be_changed() -> None:
    registry = Registry(LateDatabase(), RuntimeConfig(snapshot()))
    with pytest.raises(ApiError) as caught:
        await registry.create_key("acme", deed())
    assert caught.value.status == 503
