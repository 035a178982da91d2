"""How a command says that it failed."""

from __future__ import annotations

from gateway.cli import exit_codes


class CommandError(Exception):
    """The command cannot be carried out; the message is the one line that the shell shows."""

    def __init__(self, message: str, *, exit_code: int = exit_codes.FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
