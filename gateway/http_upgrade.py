"""Requests that offer another protocol beside the one that they are written in.

Clients that would rather speak HTTP/2 say so in every request (`Upgrade: h2c`; Java's do unless
told otherwise). A server may pass over the offer and answer in HTTP/1.1 (RFC 9110, 7.8), and this
one does. The parser takes it for accepted: it ends the request with its head, and the body would be
read as a request of its own, which must never happen to what somebody else may have written.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.http_call import Header

_FRAMING = (b"content-length", b"transfer-encoding")


def head_of_body(headers: Iterable[Header]) -> bytes | None:
    """A request's head that says how long its body is and nothing else: whoever has parsed it goes
    on with the body. None for a request without one. Names are lower-case."""
    framing = [(name, value) for name, value in headers if name in _FRAMING]
    if all(name == b"content-length" and not value.strip(b" \t0") for name, value in framing):
        return None
    lines = b"".join(b"%b: %b\r\n" % header for header in framing)
    return b"POST / HTTP/1.1\r\n" + lines + b"\r\n"
