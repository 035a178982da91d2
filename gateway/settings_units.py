"""Values as people write them in a configuration: sizes, durations, whole numbers, `auto`.

Each validator takes what YAML or an environment variable yields and raises ValueError with half a
sentence that continues "KEY: ..."; no message repeats the value: it might be a misplaced secret.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_WHOLE = re.compile(r"-?[0-9]{1,18}")
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")
_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SWITCH = {"true": True, "on": True, "false": False, "off": False}


def whole_number(value: Any) -> int:
    """An int, or its plain decimal digits as an environment variable has them ("1e3" is not)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    raise ValueError("must be a whole number")


def byte_size(value: Any) -> int:
    """Bytes: a whole number, or one with a unit (16MiB, 1.5GiB, 500KB)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        number, unit = match.groups()
        if unit in _BYTES and "." in number and unit:
            return int(float(number) * _BYTES[unit])
        if unit in _BYTES and "." not in number:
            return int(number) * _BYTES[unit]
    raise ValueError("must be a size such as 16MiB, 1GiB or a number of bytes")


def duration_s(value: Any) -> float:
    """Seconds: a number, or one with a unit (500ms, 30s, 2m, 1h, 7d)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        number, unit = match.groups()
        if unit in _SECONDS:
            return float(number) * _SECONDS[unit]
    raise ValueError("must be a duration such as 30, 30s, 500ms or 2m")


def switch(value: Any) -> bool:
    """True or false; as text (an environment variable's) `true`, `on`, `false` or `off`."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in _SWITCH:
        return _SWITCH[value]
    raise ValueError("must be true or false")


def _auto_is_none(value: Any) -> Any:
    return None if value == "auto" else value


def _off_is_zero(value: Any) -> Any:
    return 0 if value is False or value == "off" else value


Whole = Annotated[int, BeforeValidator(whole_number)]
ByteSize = Annotated[int, BeforeValidator(byte_size)]
DurationS = Annotated[float, BeforeValidator(duration_s), Field(le=86_400)]
LongDurationS = Annotated[float, BeforeValidator(duration_s), Field(le=366 * 86_400)]
Switch = Annotated[bool, BeforeValidator(switch)]

AutoIsNone = BeforeValidator(_auto_is_none)
"""On an optional field: the word `auto` (or null) becomes None, "choose for me"."""

OffIsZero = BeforeValidator(_off_is_zero)
"""On a size: the word `off` (which YAML reads as false) becomes 0."""
