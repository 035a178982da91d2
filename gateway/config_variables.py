"""Environment variables that are meant as settings and are none: `FOREBAY_SERVER_PORT`.

Only two underscores make a variable a setting's, so that those with one are nobody's mistake in
general: secrets have such names, and so has what an orchestrator tells of its services.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gateway.config_file import VARIABLE_PREFIX, keys_at, named_variables
from gateway.settings import Settings
from gateway.settings_errors import Path as KeyPath

_LONGEST = 100
"""Characters; the name of a setting has fewer."""
_OF_A_SERVICE = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
"""What Kubernetes puts into `FOREBAY_PORT` where a service is called forebay."""


def variables_without_effect(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are ignored, each with the one that would set what it seems to mean: a key's
    whole path, or the name of one of the server's, joined by single underscores. Values are in no
    way part of the answer."""
    named = named_variables(settings.model_dump(by_alias=True))
    found = {}
    for variable, value in sorted(environ.items()):
        words = variable.removeprefix(VARIABLE_PREFIX).lower()
        if (
            words == variable.lower()
            or "__" in words
            or len(words) > _LONGEST
            or variable in named
            or _OF_A_SERVICE.match(value)
        ):
            continue
        key = _meant(words.split("_"))
        if key is not None:
            path = "__".join(str(part).upper() for part in key)
            found[variable] = f"{VARIABLE_PREFIX}{path}"
    return found


def _meant(words: Sequence[str]) -> KeyPath | None:
    """A setting's path, longer than a section's name; None if there is none of these words."""
    whole = (key for key in _paths((), words) if len(key) > 1)
    return next(whole, None) or next(_paths(("server",), words), None)


def _paths(section: KeyPath, words: Sequence[str]) -> Iterator[KeyPath]:
    """Every path within `section` that takes up all of the words."""
    if not words:
        if isinstance(section[-1], str):  # an item of a list is no setting
            yield section
    elif words[0].isdecimal() and section and isinstance(section[-1], str):
        yield from _paths((*section, int(words[0])), words[1:])
    else:
        known = keys_at(section)
        for count in range(1, len(words) + 1):
            if (name := "_".join(words[:count])) in known:
                yield from _paths((*section, name), words[count:])
