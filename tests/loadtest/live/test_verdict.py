"""What is whole and as asked, and everything that is not."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.live.stream import StreamReader
from loadtest.live.verdict import Verdict, of_answer, of_error, says_when
from loadtest.plan import Turn
from loadtest.record import Outcome
from loadtest.wire.connection import (
    Answer,
    Arrival,
    ExchangeError,
    NotInTimeError,
    OutOfSocketsError,
    UnreachableError,
)
from tests.loadtest.fake_server import token_event, usage_event
from tests.loadtest.live.conversations import DONE, read_of

ASKED = Turn(2, tokens=(1, 2, 3))
LOOSE = Turn(4, tokens=(1, 2, 3), exact=False)


def judged(
    *events: bytes | dict[str, Any], turn: Turn = ASKED, whole: bool = True
) -> tuple[Outcome, str]:
    read = read_of(*((float(at_s), event) for at_s, event in enumerate(events, 1)))
    verdict = of_answer(Answer(200, {}, [], 0.0, 9.0, whole), read, turn)
    return verdict.outcome, verdict.reason or ""


A, B = token_event("a"), token_event("b", "length")
USAGE = usage_event(3, 2)


def test_an_answer_as_asked_is_well() -> None:
    assert judged(A, B, USAGE, DONE) == (Outcome.OK, "")
    assert judged(A, B, USAGE, DONE, turn=Turn(2, (1, 2, 3), expected_text="ab"))[0] is Outcome.OK


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_what_need_not_be_exact_may_end_early(finish: str) -> None:
    assert judged(A, token_event("b", finish), USAGE, DONE, turn=LOOSE)[0] is Outcome.OK


@pytest.mark.parametrize(
    ("events", "turn", "reason"),
    [
        ([A, token_event("b", "stop"), USAGE, DONE], ASKED, "finish_reason is stop, not length"),
        ([A, A, USAGE, DONE], LOOSE, "finish_reason is None"),
        ([A, token_event("b", "content_filter"), USAGE, DONE], LOOSE, "is content_filter"),
        ([A, B, usage_event(3, 1), DONE], ASKED, "completion_tokens is 1, not 2"),
        ([A, B, usage_event(3, 5), DONE], LOOSE, "completion_tokens is 5, not 1 to 4"),
        ([A, B, usage_event(4, 2), DONE], ASKED, "prompt_tokens is 4, not 3"),
        ([A, B, USAGE, DONE], Turn(2, (1, 2, 3), expected_text="ac"), "not the expected one"),
    ],
)
def test_a_whole_answer_that_is_not_as_asked_is_wrong(
    events: list[Any], turn: Turn, reason: str
) -> None:
    outcome, why = judged(*events, turn=turn)

    assert outcome is Outcome.WRONG
    assert reason in why


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], "no token came (content-type: none)"),
        ([A, B, USAGE], "without [DONE]"),
        ([A, B, DONE], "no usage came"),
        ([A, {"error": {"message": "lost"}}], "error event: lost"),
    ],
)
def test_what_began_and_did_not_end_is_broken(events: list[Any], reason: str) -> None:
    outcome, why = judged(*events)

    assert outcome is Outcome.BROKEN
    assert reason in why


def test_a_compressed_answer_is_said_to_be_one() -> None:
    headers = {"content-type": "text/event-stream", "content-encoding": "gzip"}
    verdict = of_answer(Answer(200, headers, [], 0.0, 9.0, whole=True), StreamReader(), ASKED)

    assert verdict.outcome is Outcome.BROKEN
    assert "content-encoding: gzip, which was not asked for" in (verdict.reason or "")


def test_a_redirection_says_where_to() -> None:
    answer = Answer(307, {"location": "https://h/v1/"}, [], 0.0, 1.0, whole=True)
    verdict = of_answer(answer, StreamReader(), ASKED)

    assert verdict == Verdict(Outcome.REFUSED, "status 307 (location: https://h/v1/): ")


def test_a_cut_answer_is_broken_even_after_its_last_event() -> None:
    assert judged(A, B, USAGE, DONE, whole=False) == (
        Outcome.BROKEN,
        "the connection closed in the middle of the answer",
    )


@pytest.mark.parametrize(
    ("status", "headers", "outcome", "hint"),
    [
        (429, {"retry-after": "1"}, Outcome.LIMITED, ""),
        (429, {}, Outcome.LIMITED, " (no Retry-After)"),
        (503, {}, Outcome.OVERLOADED, " (no Retry-After)"),
        (404, {}, Outcome.REFUSED, ""),
        (500, {}, Outcome.REFUSED, ""),
    ],
)
def test_a_refusal_is_named_by_its_status(
    status: int, headers: dict[str, str], outcome: Outcome, hint: str
) -> None:
    body = Arrival(0.0, b'{"error": {"message": "No\\nroom."}}')
    answer = Answer(status, headers, [body], 0.0, 1.0, whole=True)

    assert of_answer(answer, StreamReader(), ASKED) == Verdict(
        outcome, f"status {status}: No room.{hint}"
    )
    assert says_when(answer) is (hint == "")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnreachableError("x"), Outcome.UNREACHABLE),
        (OutOfSocketsError("x"), Outcome.UNREACHABLE),
        (NotInTimeError("x"), Outcome.TIMED_OUT),
        (ExchangeError("x"), Outcome.BROKEN),
    ],
)
def test_no_answer_at_all_is_named_by_what_was_in_the_way(
    error: ExchangeError, outcome: Outcome
) -> None:
    assert of_error(error) == Verdict(outcome, "x")
