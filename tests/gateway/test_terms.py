"""On what terms a request runs, from its tenant, its tier, its headers and a peer's word."""

from __future__ import annotations

from time import monotonic

import pytest

from gateway.errors import ApiError
from gateway.http_call import HttpCall
from gateway.peer import PeerTenant
from gateway.tenants import Tenant
from gateway.terms import TIMEOUT, Flows, Terms, read_terms, seconds_left
from policies.service_class import ServiceClass
from policies.slo import Slo
from tests.gateway.stage import tenant

PROMISED = tenant("acme", slo=Slo(ttft_s=0.5, tpot_s=0.1), service_class=ServiceClass.STANDARD)


def call(**headers: str) -> HttpCall:
    async def nothing(*_: object) -> None:
        return

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"method": "POST", "path": "/", "headers": raw, "state": {"request_id": "r"}}
    return HttpCall(scope, nothing, nothing)


def terms(tier: object = None, who: Tenant = PROMISED, **headers: str) -> Terms:
    return read_terms(call(**headers), tier, who, flow=b"acme", weight=3.0)


@pytest.mark.parametrize(
    ("tier", "runs_as", "promised", "served"),
    [
        (None, ServiceClass.STANDARD, True, None),
        ("auto", ServiceClass.STANDARD, True, "default"),
        ("default", ServiceClass.STANDARD, True, "default"),
        ("flex", ServiceClass.BATCH, False, "flex"),
        ("priority", ServiceClass.STANDARD, True, "default"),
    ],
)
def test_a_tier_is_a_class_no_higher_than_the_tenants(tier, runs_as, promised, served) -> None:
    found = terms(tier)
    assert (found.service_class, found.served_tier) == (runs_as, served)
    assert (found.ttft_s, found.tpot_s) == ((0.5, 0.1) if promised else (None, None))
    assert (found.flow, found.weight) == (b"acme", 3.0)


@pytest.mark.parametrize("tier", ["scale", "", 5, ["flex"], {"a": 1}, True])
def test_no_other_tier_is_known(tier) -> None:
    with pytest.raises(ApiError) as error:
        terms(tier)
    assert (error.value.status, error.value.param) == (400, "service_tier")


def test_the_first_token_is_due_by_the_promise_or_the_clients_own_time() -> None:
    found = terms()
    assert found.deadline_s == found.started_s + 0.5
    hurried = terms(**{TIMEOUT: "200"})
    assert hurried.deadline_s == hurried.timeout_at_s == hurried.started_s + 0.2
    assert hurried.due_s == pytest.approx(0.2, abs=0.1)
    patient = terms(who=tenant("beta"))
    assert (patient.deadline_s, patient.due_s, seconds_left(patient)) == (None, None, None)
    left_s = seconds_left(terms(**{TIMEOUT: "2000"}))
    assert left_s is not None
    assert 1.5 < left_s <= 2.0


@pytest.mark.parametrize(
    "value", ["", "0", "-5", "1.5", "soon", "86400001", "99999999999", "9" * 5000, "٣"]
)
def test_a_time_is_whole_milliseconds_of_at_most_a_day(value) -> None:
    with pytest.raises(ApiError) as error:
        terms(**{TIMEOUT: value})
    assert error.value.status == 400


def test_a_time_may_be_a_day() -> None:
    left_s = seconds_left(terms(**{TIMEOUT: "86400000"}))
    assert left_s is not None
    assert 86_390 < left_s <= 86_400


def test_batches_run_in_the_gaps() -> None:
    found = terms("priority").as_batch()
    assert (found.service_class, found.ttft_s, found.tpot_s) == (ServiceClass.BATCH, None, None)


def test_a_peer_says_how_its_tenants_stand() -> None:
    peer = PeerTenant("t", "tenant", ServiceClass.INTERACTIVE, 4.0, due_s=0.25, tpot_s=0.03)
    found = terms(**{TIMEOUT: "60000"}).as_peers(peer, b"peers")
    assert (found.service_class, found.flow, found.weight) == (
        ServiceClass.INTERACTIVE,
        b"peers",
        4.0,
    )
    # it is an order and no promise of ours
    assert (found.ttft_s, found.tpot_s) == (None, 0.03)
    assert found.deadline_s == pytest.approx(monotonic() + 0.25, abs=0.1)
    silent = terms().as_peers(PeerTenant("t", "tenant"), b"peers")
    assert silent.flow == b"peers"
    assert (silent.service_class, silent.weight, silent.ttft_s) == (
        ServiceClass.STANDARD,
        3.0,
        0.5,
    )


def test_flows_tell_tenants_apart_without_naming_them() -> None:
    flows = Flows(b"secret")
    assert flows.of("acme") == flows.of("acme") != flows.of("beta")
    assert b"acme" not in flows.of("acme")
    assert Flows(b"other").of("acme") != flows.of("acme")
