"""Reading one JSON object field by field: null means omitted, every refusal names its field."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import cast

from gateway.errors import ApiError, bad_request
from gateway.wire.json_body import field_path


class Fields:
    """A JSON object being read. What was never asked for is an unknown field (`unread`).

    Messages say what a field must be and never repeat what it was.
    """

    __slots__ = ("_path", "_read", "_values")

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """The field's full path, as `param` shows it."""
        return field_path(self._path, name)

    def wrong(self, name: str, must: str) -> ApiError:
        """A 400 for one field: `{path} {must}`."""
        path = self.path(name)
        return bad_request(f"{path} {must}", param=path)

    def unread(self) -> Iterable[str]:
        """Names that nobody asked for."""
        return self._values.keys() - self._read

    def given(self, names: Container[str]) -> list[str]:
        """Those of `names` that are here and not null, in the body's order."""
        found = [name for name in self._values if name in names]
        self._read.update(found)
        return [name for name in found if self._values[name] is not None]

    def value(self, name: str) -> object:
        """The raw value, None if omitted."""
        self._read.add(name)
        return self._values.get(name)

    def string(self, name: str) -> str | None:
        """A string or None."""
        value = self.value(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, "must be a string.")

    def required_string(self, name: str) -> str:
        """A string; omitted is a 400 too."""
        value = self.string(name)
        if value is None:
            raise self.wrong(name, "is required and must be a string.")
        return value

    def boolean(self, name: str) -> bool | None:
        """True, False or None."""
        value = self.value(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(name, "must be true or false.")

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number within [low, high], or None."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number.")
        if not low <= value <= high:
            raise self.wrong(name, f"must be between {low:g} and {high:g}.")
        return float(value)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """An integer of at least `low` and at most `high`, or None; 5.0 counts as 5."""
        value = self.value(name)
        if value is None:
            return None
        whole = as_integer(value)
        if whole is None:
            raise self.wrong(name, "must be an integer.")
        if high is None and whole < low:
            raise self.wrong(name, f"must be at least {low}.")
        if high is not None and not low <= whole <= high:
            raise self.wrong(name, f"must be between {low} and {high}.")
        return whole

    def array(self, name: str) -> list[object] | None:
        """A list or None."""
        value = self.value(name)
        if value is None or isinstance(value, list):
            return value
        raise self.wrong(name, "must be an array.")

    def object(self, name: str) -> Fields | None:
        """The fields of a nested object, or None."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, dict):
            return Fields(value, self.path(name))
        raise self.wrong(name, "must be an object.")


def as_integer(value: object) -> int | None:
    """The integer that a JSON number says (5 and 5.0 are 5), None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


def as_token_ids(values: list[object]) -> list[int] | None:
    """The token ids that an array says, as `as_integer` reads each; None unless all are at least 0.

    There may be millions, so nothing is done here for each of them by itself.
    """
    kinds = set(map(type, values))
    if not kinds <= {int, float}:
        return None
    numbers = cast(list[int], values)
    if float in kinds:
        numbers = list(map(int, numbers))
        if numbers != values:
            return None
    return numbers if min(numbers, default=0) >= 0 else None
