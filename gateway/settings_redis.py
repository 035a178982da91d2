"""Which Redis, how it is reached, and how its address is shown without its password."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import Field, PlainValidator, model_validator

from gateway.settings_section import Section
from gateway.settings_units import ByteSize, LongDurationS, Switch, Whole

EMBEDDED = "embedded"
OFF = "off"

_MUST_BE = (
    "must be embedded, off, redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH?db=DB, "
    "with USER:PASSWORD@ after the slashes if needed and its special characters percent-encoded"
)


def _redis_url(value: Any) -> str:
    """`embedded`, `off` (which YAML reads as false), or an address that the client takes whole."""
    if value in (EMBEDDED, OFF) or value is False:
        return value or OFF
    parts = _split(value)
    if parts is None or parts.fragment:
        raise ValueError(_MUST_BE)
    query = parse_qsl(parts.query, keep_blank_values=True)
    if any(name != "db" or not number.isdecimal() for name, number in query) or len(query) > 1:
        raise ValueError(_MUST_BE)
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme == "unix":
        good = not host and len(parts.path) > 1
    else:
        number = parts.path.removeprefix("/")
        good = bool(parts.hostname) and (number.isdecimal() if number else True)
        good = good and not (number and query)
    if not good:
        raise ValueError(_MUST_BE)
    return str(value)


RedisUrl = Annotated[str, PlainValidator(_redis_url)]


class RedisSettings(Section):
    """The Redis or Valkey that gateways share.

    `url` is where everything is kept, `kv_url` where KV goes instead, if set. `timeout_ms` bounds
    what is asked of it beside loads; `memory` is the embedded server's limit in bytes; `ttl` how
    many seconds a KV block lives there after its last store; `max_connections`
    counts those for KV (one for questions, one for stores, the others for loads); `tls_ca` is a PEM
    file of the authorities that sign a `rediss://` server's certificate (None: the system's);
    `cluster` says that the server for KV is one.
    """

    # Not in the repr: the URLs may hold passwords.
    url: Annotated[RedisUrl, Field(repr=False)] = EMBEDDED
    kv_url: Annotated[RedisUrl | None, Field(repr=False)] = None
    timeout_ms: Annotated[Whole, Field(ge=1, le=60_000)] = 50
    encrypt: Switch = False
    memory: Annotated[ByteSize, Field(ge=16 << 20)] = 1 << 30
    ttl: Annotated[LongDurationS, Field(ge=1)] = 7 * 86_400.0
    max_connections: Annotated[Whole, Field(ge=3, le=256)] = 4
    tls_ca: Path | None = None
    cluster: Switch = False

    @property
    def for_kv(self) -> str:
        """Where KV goes: `embedded`, `off` or a URL."""
        return self.url if self.kv_url is None else self.kv_url

    @property
    def embedded(self) -> bool:
        """Whether anything goes to the embedded server."""
        return EMBEDDED in (self.url, self.kv_url)

    @model_validator(mode="after")
    def _options_fit_the_urls(self) -> Self:
        urls = [url for url in (self.url, self.kv_url) if url is not None]
        if self.tls_ca is not None and not any(url.startswith("rediss:") for url in urls):
            raise ValueError("tls_ca is only for a rediss:// url")
        if self.cluster:
            if not self.for_kv.startswith(("redis:", "rediss:")):
                raise ValueError("cluster needs a redis:// or rediss:// url")
            if _database(self.for_kv) != 0:
                raise ValueError("cluster has no database but 0")
        return self


def url_secrets(url: str) -> frozenset[str]:
    """The passwords in a Redis URL, as written there and decoded."""
    parts = _split(url)
    password = parts.password if parts else None
    return frozenset({password, unquote(password)} if password else ())


def shown_url(url: str) -> str:
    """A Redis URL as it may be logged: the password, if there is one, is replaced by `***`, and so
    is a user alone, who may be a password in the wrong place."""
    parts = _split(url)
    if parts is None or "@" not in parts.netloc:
        return url
    credentials, _, host = parts.netloc.rpartition("@")
    user, colon, _ = credentials.partition(":")
    shown = f"{user}:***" if colon else "***"
    return parts._replace(netloc=f"{shown}@{host}").geturl()


def _split(url: object) -> SplitResult | None:
    """The URL's parts; None if it is none that Redis is reached by."""
    if not isinstance(url, str) or any(mark.isspace() for mark in url):
        return None
    try:
        parts = urlsplit(url)
        _ = parts.port  # reading it is what checks it
    except ValueError:
        return None
    return parts if parts.scheme in ("redis", "rediss", "unix") else None


def _database(url: str) -> int:
    parts = urlsplit(url)
    number = parts.path.removeprefix("/") or dict(parse_qsl(parts.query)).get("db", "0")
    return int(number)
