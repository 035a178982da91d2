"""What every part of the settings tree is made of."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Section(BaseModel):
    """Base of every part of the tree: frozen, and no key is accepted that is not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_all_defaults(cls, value: Any) -> Any:
        """A section that is there but empty ("limits:" alone on its line) means its defaults."""
        return {} if value is None else value


def variable_name(value: str) -> str:
    """The name of an environment variable; raises ValueError for anything else."""
    if not _VARIABLE.fullmatch(value):
        raise ValueError("must be the name of an environment variable")
    return value
