"""Typed reading of a checkpoint's own settings, with errors that name file and field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import ModelLoadError, UnsupportedArchitectureError


class Fields:
    """Named values from one file. A null counts as absent; a wrong type is a ModelLoadError."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self._values, self._prefix = path, values, prefix

    def __contains__(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None

    def raw(self, key: str) -> Any:
        """The value as it stands in the file; None if absent."""
        return self._values.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; absent without a default is an error."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, "an integer", value)
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            self._wrong(key, "at least 1", value)
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        least: float = -math.inf,
        greatest: float = math.inf,
    ) -> float:
        """A real number from `least` to `greatest`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(key, "a number", value)
        if not least <= value <= greatest:
            self._wrong(key, f"from {least:g} to {greatest:g}", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self._wrong(key, "a string", value)
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings, not empty."""
        value = self._get(key, None)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            self._wrong(key, "a list of strings", value)
        return value

    def section(self, key: str) -> Fields:
        """A nested object; empty if absent."""
        value = self.raw(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self._wrong(key, "an object", value)
        return Fields(self.path, value)

    def with_values(self, values: Mapping[str, Any]) -> Fields:
        """The same fields with these set."""
        return Fields(self.path, {**self._values, **values}, self._prefix)

    def values(self) -> list[Any]:
        """Every value, in the file's order."""
        return list(self._values.values())

    def unsupported(self, reason: str) -> NoReturn:
        """Raise UnsupportedArchitectureError for this file."""
        raise UnsupportedArchitectureError(f"{self.path}: {reason}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.path}: {self._prefix}{key} is missing")
        return value

    def _wrong(self, key: str, wanted: str, value: object) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:40] + "..."
        raise ModelLoadError(f"{self.path}: {self._prefix}{key} must be {wanted}, not {shown}")
