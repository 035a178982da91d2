"""Names that an endpoint of our own does not have: a slip of the pen there must not look done.

OpenAI's endpoints are another matter: clients send them fields of other servers' (see
`gateway.unknown_fields`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gateway.errors import bad_request
from gateway.settings_errors import did_you_mean

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def refuse_unknown_fields(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises a 400 ApiError for the first of a body's names `given` that is not `known`."""
    _refuse("field", given, known)


def refuse_unknown_parameters(query: Iterable[str], known: Iterable[str]) -> None:
    """The same of a query string's names."""
    _refuse("parameter", query, known)


def _refuse(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = tuple(known)
    for name in given:
        if name in known:
            continue
        if not _PLAIN.fullmatch(name):  # most likely a value in a name's place: not repeated
            raise bad_request(f"There is a {what} here whose name is not a plain word.")
        hint = did_you_mean(name, known) or f"; there is {_listed(known)}"
        raise bad_request(f"{name} is not a {what} of this endpoint{hint}", param=name)


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names)}." if names else "none."
