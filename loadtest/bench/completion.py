"""One streamed completion: the request's body, and what its answer says.

Reading is strict. An answer that is cut, too short, refused or without its counts is a failure
and enters no figure: half an answer is always faster than a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from loadtest.wire.connection import Answer, Arrival
from loadtest.wire.events import EventSplitter
from loadtest.wire.refusal import error_message
from loadtest.wire.refusal import refusal as refusal

_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. Times count from the sending of the request.

    `ttft_s` ends with the first event that holds a choice, the first token. `tpot_s` is the time
    from there to the last such event over the tokens after the first; None for a single token.
    `chunks` is in how many events the tokens came, `text` what they say together. `cached_tokens`
    is None if the server does not say.
    """

    pass_name: str
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    chunks: int
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A request without a whole answer, and why, in one line."""

    pass_name: str
    reason: str


def completion_body(
    model: str, prompt: Sequence[int], output_tokens: int, *, stream: bool = True, **fields: object
) -> bytes:
    """The JSON of one greedy `/v1/completions` request for exactly `output_tokens` tokens;
    `fields` are more of its fields."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **fields,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return orjson.dumps(body)


def read_stream(
    answer: Answer, *, pass_name: str, prompt_tokens: int, output_tokens: int
) -> Completion | Failure:
    """What a streamed answer amounts to, held against the lengths that were asked for."""
    try:
        return _read(answer, pass_name, prompt_tokens, output_tokens)
    except _BrokenAnswerError as broken:
        return Failure(pass_name, str(broken))


class _BrokenAnswerError(Exception):
    """The stream is not what was asked for."""


def _read(answer: Answer, pass_name: str, prompt_tokens: int, output_tokens: int) -> Completion:
    if answer.status != 200:
        raise _BrokenAnswerError(refusal(answer))
    first_s = last_s = None
    finish: str | None = None
    usage: dict[str, Any] | None = None
    done = False
    texts: list[str] = []
    for at_s, payload in _events(answer.arrivals):
        if payload == _DONE:
            done = True
            continue
        event = _decoded(payload)
        if "error" in event:
            raise _BrokenAnswerError(f"error event: {error_message(event['error'])}")
        if choices := event.get("choices"):
            first_s = at_s if first_s is None else first_s
            last_s = at_s
            if text := choices[0].get("text"):
                texts.append(text)
            finish = choices[0].get("finish_reason") or finish
        usage = event.get("usage") or usage
    if not answer.whole:
        raise _BrokenAnswerError("the connection closed in the middle of the answer")
    if first_s is None or last_s is None:
        raise _BrokenAnswerError("no token came")
    if not done:
        raise _BrokenAnswerError("the stream ended without [DONE]")
    if finish != "length":
        raise _BrokenAnswerError(f"finish_reason is {finish}, not length")
    if usage is None:
        raise _BrokenAnswerError("no usage came, though stream_options asked for it")
    for name, wanted in (("completion_tokens", output_tokens), ("prompt_tokens", prompt_tokens)):
        if usage.get(name) != wanted:
            raise _BrokenAnswerError(f"usage.{name} is {usage.get(name)}, not {wanted}")
    return Completion(
        pass_name=pass_name,
        ttft_s=first_s - answer.sent_at_s,
        tpot_s=(last_s - first_s) / (output_tokens - 1) if output_tokens > 1 else None,
        e2e_s=answer.ended_at_s - answer.sent_at_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        chunks=len(texts),
        text="".join(texts),
    )


def _events(arrivals: Sequence[Arrival]) -> Iterator[tuple[float, bytes]]:
    """The data of every server-sent event, and when the piece that ended it came."""
    events = EventSplitter()
    for at_s, piece in arrivals:
        for payload in events.feed(piece):
            yield at_s, payload


def _decoded(payload: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(payload)
    except orjson.JSONDecodeError:
        raise _BrokenAnswerError("an event is not JSON") from None
    if not isinstance(event, dict):
        raise _BrokenAnswerError("an event is not a JSON object")
    return event
