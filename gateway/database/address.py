"""A database's address: what of it is secret, and how it is shown."""

from __future__ import annotations

from urllib.parse import unquote

EMBEDDED = "sqlite"
"""The address that stands for a file in the state directory."""

_SECRET_PARAMETERS = ("password", "sslpassword")


def database_secrets(url: str) -> frozenset[str]:
    """The passwords in an address, as written there and decoded."""
    found: set[str] = set()
    # not urlsplit: it takes no list of hosts, and what it says against an address may quote it
    place, _, query = url.partition("://")[2].partition("?")
    found.add(place.rpartition("@")[0].partition(":")[2])
    for part in query.partition("#")[0].split("&"):
        name, _, value = part.partition("=")
        if name in _SECRET_PARAMETERS:
            found.add(value)
    return frozenset(found | {unquote(secret) for secret in found}) - {""}


def shown_database(url: str) -> str:
    """The address as it may be logged: without its query, and with `***` for who connects, for a
    user alone may be a password in the wrong place."""
    shown = url.partition("?")[0].partition("#")[0]
    scheme, separator, rest = shown.partition("://")
    # the last "@": one that is not percent-encoded may be part of a password
    credentials, at, host = rest.rpartition("@")
    if not at:
        return shown
    user, colon, _ = credentials.partition(":")
    return f"{scheme}{separator}{user + ':' if colon else ''}***@{host}"
