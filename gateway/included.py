"""Request headers by which a client asks for more in its answer: `NAME: include`."""

from __future__ import annotations

from gateway.errors import bad_request
from gateway.http_call import HttpCall

_INCLUDE = "include"


def is_asked_for(call: HttpCall, name: str) -> bool:
    """Whether the client asks by the header of this name. Raises a 400 ApiError for what is no such
    question."""
    value = call.header(name)
    if value is None:
        return False
    if value.strip().lower() != _INCLUDE:
        raise bad_request(f"The header {name} must be {_INCLUDE}, or be left out.")
    return True
