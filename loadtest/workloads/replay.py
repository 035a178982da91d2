"""A trace's requests as prompts: made anew, as shared as they were."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from loadtest.plan import Load, Session, Turn
from loadtest.trace import Trace, TraceRequest
from loadtest.vocabulary import DEFAULT_VOCABULARY, Vocabulary
from loadtest.workloads.randomness import random_blocks, random_tokens


def load_of(trace: Trace, *, vocabulary: Vocabulary = DEFAULT_VOCABULARY, seed: int = 0) -> Load:
    """Each request at its time, a session of one turn. An answer of no token is asked for one.

    Raises ValueError for a request that has blocks, but too few for its prompt.
    """
    return Load(trace.name, list(replayed(trace, seed, vocabulary)), trace.tenants)


def replayed(trace: Trace, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:
    """As `load_of`, one after the other."""
    for number, request in enumerate(trace.requests):
        tokens = _tokens(trace, number, seed, vocabulary)
        turn = Turn(max(1, request.output_tokens), tokens=tokens)
        yield Session((turn,), request.tenant, request.at_s)


def _tokens(trace: Trace, number: int, seed: int, vocabulary: Vocabulary) -> array[int]:
    request: TraceRequest = trace.requests[number]
    if not request.blocks:
        return random_tokens(f"trace/{seed}/{number}", request.prompt_tokens, vocabulary)
    if len(request.blocks) * trace.block_tokens < request.prompt_tokens:
        raise ValueError(
            f"{trace.name}: request {number} has {request.prompt_tokens} tokens in only "
            f"{len(request.blocks)} blocks of {trace.block_tokens}"
        )
    blocks = random_blocks(f"trace/{seed}", request.blocks, trace.block_tokens, vocabulary)
    return blocks[: request.prompt_tokens]
