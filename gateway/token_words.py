"""How a single token is shown where it stands alone, in log-probabilities."""

from __future__ import annotations

from engine.tokenizer import Tokenizer


def token_word(tokenizer: Tokenizer, token_id: int) -> str:
    """Its text; half a character becomes U+FFFD (the bytes say which half)."""
    if tokenizer.is_control(token_id):
        return tokenizer.token_text(token_id)
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Its bytes; a control token's are those of its name."""
    if tokenizer.is_control(token_id):
        return tokenizer.token_text(token_id).encode()
    return tokenizer.token_bytes(token_id)
