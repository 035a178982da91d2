"""Token ids to text as they come, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.tokenizer import Tokenizer


class Detokenizer:
    """The text of one generated sequence, a few tokens at a time. One caller at a time.

    The pieces of `feed` joined are the UTF-8 reading of the tokens' bytes, however the tokens are
    split between calls: a character comes out with its last byte, bytes that cannot be part of any
    character become U+FFFD, control tokens are not shown. A text that follows a prompt keeps its
    first space. Work per token does not depend on how many came before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    @property
    def pending_bytes(self) -> bytes:
        """Bytes of a character that has begun and is not complete."""
        return self._decoder.getstate()[0]

    def finish(self) -> str:
        """The end: a character cut off in the middle is dropped, not shown as U+FFFD.

        Nothing else is ever held back, so this is "". Feeding again starts a new text.
        """
        self._decoder.reset()
        return ""
