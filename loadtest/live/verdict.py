"""Whether an answer is whole and as asked. Half an answer is always faster than a whole one, so
what is not goes into no figure of speed."""

from __future__ import annotations

from typing import NamedTuple

from loadtest.live.stream import StreamReader, Usage
from loadtest.plan import Turn
from loadtest.record import Outcome
from loadtest.wire.connection import Answer, ExchangeError, NotInTimeError, UnreachableError
from loadtest.wire.refusal import refusal

_REFUSALS = {429: Outcome.LIMITED, 503: Outcome.OVERLOADED}
_FINISHES = ("stop", "length", "tool_calls", "function_call")


class Verdict(NamedTuple):
    """How a request ended, and why in one line if not well."""

    outcome: Outcome
    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it was answered whole and as asked."""
        return self.outcome is Outcome.OK


def of_error(error: ExchangeError) -> Verdict:
    """Of a request that got no whole answer."""
    if isinstance(error, UnreachableError):
        return Verdict(Outcome.UNREACHABLE, str(error))
    if isinstance(error, NotInTimeError):
        return Verdict(Outcome.TIMED_OUT, str(error))
    return Verdict(Outcome.BROKEN, str(error))


def of_answer(answer: Answer, read: StreamReader, turn: Turn) -> Verdict:
    """Of an answer whose stream has been read to the end."""
    if answer.status != 200:
        return Verdict(_REFUSALS.get(answer.status, Outcome.REFUSED), _refusal(answer))
    if (why := _why_broken(answer, read)) is not None:
        return Verdict(Outcome.BROKEN, why)
    if read.usage is None:
        return Verdict(Outcome.BROKEN, "no usage came, though stream_options asked for it")
    if (why := _why_wrong(read, read.usage, turn)) is not None:
        return Verdict(Outcome.WRONG, why)
    return Verdict(Outcome.OK)


def says_when(answer: Answer) -> bool:
    """Whether a refusal for want of room says when to come again."""
    return answer.status not in _REFUSALS or "retry-after" in answer.headers


def _refusal(answer: Answer) -> str:
    return refusal(answer) + ("" if says_when(answer) else " (no Retry-After)")


def _why_broken(answer: Answer, read: StreamReader) -> str | None:
    if read.broken is not None:
        return read.broken
    if not answer.whole:
        return "the connection closed in the middle of the answer"
    if read.first_s is None:
        told = f"content-type: {answer.headers.get('content-type', 'none')}"
        if (encoding := answer.headers.get("content-encoding")) is not None:
            told += f", content-encoding: {encoding}, which was not asked for"
        return f"no token came ({told})"
    return None if read.done else "the stream ended without [DONE]"


def _why_wrong(read: StreamReader, usage: Usage, turn: Turn) -> str | None:
    """What is not as asked in a whole answer."""
    used, most = usage.completion_tokens, turn.output_tokens
    if turn.exact and read.finish != "length":
        return f"finish_reason is {read.finish}, not length"
    if read.finish not in _FINISHES:
        return f"finish_reason is {read.finish}"
    if turn.exact and used != most:
        return f"usage.completion_tokens is {used}, not {most}"
    if not 1 <= used <= most:
        return f"usage.completion_tokens is {used}, not 1 to {most}"
    if turn.tokens is not None and usage.prompt_tokens != len(turn.tokens):
        return f"usage.prompt_tokens is {usage.prompt_tokens}, not {len(turn.tokens)}"
    if turn.expected_text is not None and read.text != turn.expected_text:
        return "the text is not the expected one"
    return None
