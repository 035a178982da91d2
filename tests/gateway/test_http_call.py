"""Who asks, as told by the connection and by proxies that are trusted."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from gateway.http_call import HttpCall

PROXIES = (ip_network("10.0.0.0/8"), ip_network("::1"))


def call(peer: str | None, *forwarded: str) -> HttpCall:
    async def nothing(*args):
        raise AssertionError

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "client": (peer, 1) if peer else None,
        "headers": [(b"x-forwarded-for", value.encode()) for value in forwarded],
        "state": {"request_id": "r"},
    }
    return HttpCall(scope, nothing, nothing)


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.9", [], "192.0.2.9"),
        ("192.0.2.9", ["198.51.100.1"], "192.0.2.9"),  # nobody we trust says so
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
        ("::1", ["198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", ["198.51.100.1, 10.0.0.2"], "198.51.100.1"),
        ("10.0.0.1", ["6.6.6.6, 198.51.100.1"], "198.51.100.1"),  # the client's own words
        ("10.0.0.1", ["6.6.6.6", "198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", ["10.0.0.3,10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["", ""], "10.0.0.1"),
        ("10.0.0.1", ["not an address"], "not an address"),
        (None, ["198.51.100.1"], None),
    ],
)
def test_client_address(peer, forwarded, address):
    assert call(peer, *forwarded).client_address(PROXIES) == address


def test_without_trusted_proxies_the_peer_is_the_client():
    assert call("10.0.0.1", "198.51.100.1").client_address(()) == "10.0.0.1"
