"""Talking to a running server, and what to say when that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from gateway.cli import exit_codes
from gateway.cli.errors import CommandError

DEFAULT_URL = "http://127.0.0.1:8000"
_NEXT_STEPS = {
    "tenant_not_found": "`forebay tenants list` says which there are",
    "key_not_found": "`forebay keys list` says which there are",
    "tenant_exists": "`forebay tenants update` changes it",
}
"""What to do about a refusal, by its `code`."""


@contextmanager
def connected(url: str, key: str, *, read_timeout_s: float) -> Iterator[httpx.Client]:
    """A client for the server at `url` (with or without "/v1"), which sends `key`, without the
    white space around it that a file's last line brings along.

    What goes wrong with the connection inside becomes a CommandError that names the next step.
    """
    base = url.rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(10.0, read=read_timeout_s)
    try:
        with _client(base, _bearer(key), timeout) as client:
            yield client
    except httpx.InvalidURL:
        raise CommandError("--url: is not a URL", exit_code=exit_codes.USAGE) from None
    except httpx.UnsupportedProtocol:
        raise CommandError(
            "--url: must begin with http:// or https://", exit_code=exit_codes.USAGE
        ) from None
    except httpx.ConnectError as error:
        if "[SSL" in str(error):
            raise CommandError(
                f"no TLS with {base}: it is not HTTPS, or its certificate is not trusted "
                "(SSL_CERT_FILE names one that is)"
            ) from None
        raise CommandError(f"no server answers at {base}; is `forebay serve` running?") from None
    except httpx.TimeoutException:
        raise CommandError(f"the server at {base} takes too long to answer") from None
    except httpx.TransportError as error:
        raise CommandError(f"the connection to {base} broke ({type(error).__name__})") from None
    except httpx.DecodingError:
        raise CommandError(f"what answers at {base} is not forebay") from None


def _bearer(key: str) -> bytes:
    """The header's value. A key of the environment goes out with the bytes that it has there."""
    value = key.strip().encode("utf-8", "surrogateescape")
    if any(byte < 0x20 or byte == 0x7F for byte in value):
        raise CommandError(
            "the key has a line break or another control character in it: is it one key alone?",
            exit_code=exit_codes.USAGE,
        )
    return b"Bearer " + value


def _client(base: str, authorization: bytes, timeout: httpx.Timeout) -> httpx.Client:
    """Raises CommandError where the environment says what cannot be used: httpx reads certificates
    and looks for proxies at once."""
    try:
        return httpx.Client(
            base_url=base, headers={b"authorization": authorization}, timeout=timeout
        )
    except OSError as error:  # ssl.SSLError too
        variables = [name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ]
        where = " or ".join(variables) or "this machine's certificates"
        raise CommandError(
            f"{where}: cannot be read as certificates ({error.strerror or type(error).__name__})",
            exit_code=exit_codes.USAGE,
        ) from None
    except (ImportError, ValueError):
        raise CommandError(
            "the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names is of no kind that can be "
            "used: it must begin with http://; NO_PROXY names hosts that need none",
            exit_code=exit_codes.USAGE,
        ) from None


def refusal(response: httpx.Response, *, key_hint: str) -> str:
    """What the server said against a request, and what to do about it; that is `key_hint` where it
    is the key that is wrong."""
    try:
        error = response.json()["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = "no reason given", None
    unauthorized = response.status_code == httpx.codes.UNAUTHORIZED
    step = key_hint if unauthorized else _NEXT_STEPS.get(str(code))
    hint = "" if step is None else f" ({step})"
    return f"the server answered {response.status_code}: {printable(str(message))}{hint}"


def printable(text: str) -> str:
    """Text without the control characters by which a server could command the terminal."""
    return "".join(
        character
        for character in text
        if character in "\n\t" or not (ord(character) < 32 or 127 <= ord(character) < 160)
    )
