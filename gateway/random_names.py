"""Names that nobody can guess and nobody has twice, many from one question to the system."""

from __future__ import annotations

from secrets import token_hex

_NAMES_AT_ONCE = 128


class RandomNames:
    """Hexadecimal digits, as many each time. Belongs to one process, which must not fork."""

    __slots__ = ("_at", "_digits", "_drawn")

    def __init__(self, n_bytes: int) -> None:
        """Of so many random bytes each, at least one."""
        self._digits = 2 * n_bytes
        self._drawn = ""
        self._at = 0

    def next(self) -> str:
        """One more."""
        at = self._at
        if at == len(self._drawn):
            self._drawn, at = token_hex(self._digits // 2 * _NAMES_AT_ONCE), 0
        self._at = at + self._digits
        return self._drawn[at : self._at]
