"""Talking to a running server, and what to say when that fails."""

from __future__ import annotations

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
    """A client for the server at `url` (with or without "/v1"), which sends `key`.

    What goes wrong with the connection inside becomes a CommandError that names the next step.
    """
    base = url.rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(10.0, read=read_timeout_s)
    try:
        headers = {b"authorization": f"Bearer {key}".encode()}
        with httpx.Client(base_url=base, headers=headers, timeout=timeout) as client:
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
