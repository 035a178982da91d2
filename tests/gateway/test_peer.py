"""The header with which one forebay speaks for a tenant to another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http_call import HttpCall
from gateway.peer import CLOCKS_APART_S, HEADER, PeerTenant, _seal, peer_tenant, sign
from policies.service_class import ServiceClass

SECRET, BODY, NOW_S = b"shared", b'{"model":"m"}', 1_800_000_000.0
ACME = PeerTenant("acme", "user")


def call(value: str | None, request_id: str = "req-1") -> HttpCall:
    headers = [(b"x-request-id", request_id.encode())]
    if value is not None:
        headers.append((HEADER.encode(), value.encode()))

    async def nothing(*_: object) -> None:
        return

    scope = {
        "method": "POST",
        "path": "/",
        "headers": headers,
        "state": {"request_id": request_id},
    }
    return HttpCall(scope, nothing, nothing)


def signed(tenant: PeerTenant = ACME, secret: bytes = SECRET, now_s: float = NOW_S) -> str:
    return sign(secret, tenant, request_id="req-1", body=BODY, now_s=now_s)


@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1, max_size=80), st.sampled_from(["tenant", "user", "none"]))
def test_what_was_said_is_what_is_understood(name, scope):
    tenant = PeerTenant(name, scope)
    assert peer_tenant(call(signed(tenant)), BODY, SECRET, NOW_S + 1) == tenant


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(ServiceClass)),
    st.floats(0.001, 1000),
    st.none() | st.floats(-5, 3600),
    st.none() | st.floats(0.001, 10),
)
def test_how_it_stands_is_understood_to_a_thousandth(service_class, weight, due_s, tpot_s):
    tenant = PeerTenant("acme", "tenant", service_class, weight, due_s, tpot_s)
    found = peer_tenant(call(signed(tenant)), BODY, SECRET, NOW_S)
    assert (found.id, found.cache_scope, found.service_class) == ("acme", "tenant", service_class)
    assert found.weight == pytest.approx(weight, abs=0.001)
    for said, understood in ((due_s, found.due_s), (tpot_s, found.tpot_s)):
        if said is None:
            assert understood is None
        else:  # what is overdue is due now
            assert understood == pytest.approx(max(0.0, said), abs=0.001)


def test_a_peer_of_the_first_version_says_nothing_of_how_it_stands():
    assert signed().startswith("1.")
    found = peer_tenant(call(signed()), BODY, SECRET, NOW_S)
    assert (found.service_class, found.due_s, found.tpot_s) == (None, None, None)


@pytest.mark.parametrize("part", [3, 4, 5, 6])
@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "٣", "9999999999"])
def test_what_cannot_be_read_is_refused_even_with_the_right_seal(part, value):
    parts = signed(PeerTenant("a", "tenant", ServiceClass.BATCH, 1.0, 1.0, 1.0)).split(".")[:-1]
    parts[part] = value
    said = ".".join(parts)
    seal = _seal(SECRET, said, "req-1", BODY)
    refused(call(f"{said}.{seal}"), BODY)


def test_without_the_header_it_is_a_client_like_any_other():
    assert peer_tenant(call(None), BODY, SECRET, NOW_S) is None


@pytest.mark.parametrize("apart_s", [-CLOCKS_APART_S, 0, CLOCKS_APART_S])
def test_clocks_may_be_two_minutes_apart(apart_s):
    assert peer_tenant(call(signed()), BODY, SECRET, NOW_S + apart_s) == ACME


@pytest.mark.parametrize("apart_s", [-CLOCKS_APART_S - 2, CLOCKS_APART_S + 2, 86_400])
def test_but_no_more(apart_s):
    refused(call(signed()), BODY, NOW_S + apart_s)


def test_another_secret_body_or_request_is_refused():
    refused(call(signed(secret=b"other")), BODY)
    refused(call(signed()), BODY + b" ")
    refused(call(signed(), "req-2"), BODY)


@pytest.mark.parametrize("tenant", [ACME, replace(ACME, service_class=ServiceClass.BATCH)])
def test_every_character_counts(tenant):
    value = signed(tenant)
    for at in range(len(value)):
        other = "0" if value[at] != "0" else "1"
        refused(call(value[:at] + other + value[at + 1 :]), BODY)
        refused(call(value[:at] + value[at + 1 :]), BODY)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=300))
def test_nonsense_is_refused(value):
    refused(call(value), BODY)


def test_no_two_headers_are_alike():
    assert signed() != signed()


def refused(of: HttpCall, body: bytes, now_s: float = NOW_S) -> None:
    with pytest.raises(ApiError) as error:
        peer_tenant(of, body, SECRET, now_s)
    assert error.value.status == 401
    assert "share the server secret" in error.value.message
