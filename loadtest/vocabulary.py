"""Which token ids prompts are made of."""

from __future__ import annotations

from typing import NamedTuple


class Vocabulary(NamedTuple):
    """Token ids from `first` up to and without `end`. Models keep control tokens at either end."""

    first: int = 256
    end: int = 48_000


DEFAULT_VOCABULARY = Vocabulary()
