"""A choice's text against the plain reading of all its bytes, however they arrive."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import EngineOutput, FinishReason
from gateway.text_choice import EchoedPrompt, TextChoice
from tests.gateway.fakes import EOS, ByteTokenizer, logprobs_of

TEXTS = st.text(alphabet="ab é👩\u200d", max_size=24)
STOPS = st.lists(st.text(alphabet="ab é👩", min_size=1, max_size=5), max_size=3)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def outputs(text: str, cuts: list[int], *, with_logprobs: bool):
    tokens = [*text.encode(), EOS]
    at = 0
    i = 0
    while at < len(tokens):
        piece = tokens[at : at + cuts[i % len(cuts)]]
        at += len(piece)
        i += 1
        ended = at >= len(tokens)
        yield EngineOutput(
            request_id="r",
            token_ids=tuple(piece),
            logprobs=tuple(logprobs_of(t, 1) for t in piece) if with_logprobs else (),
            cached_tokens=0,
            finish_reason=FinishReason.STOP if ended else None,
            stopped_by_token=ended,
        )


def cut_at_first_stop(text: str, stops: list[str]) -> str:
    starts = [text.find(stop) for stop in stops if stop in text]
    return text[: min(starts)] if starts else text


@settings(max_examples=150, deadline=None)
@given(TEXTS, STOPS, CUTS, st.booleans())
def test_deltas_join_to_the_text_before_the_first_stop(text, stops, cuts, with_logprobs):
    choice = TextChoice(ByteTokenizer(), stops=tuple(stops), wants_logprobs=with_logprobs)
    shown, entries, reason = "", [], None
    for output in outputs(text, cuts, with_logprobs=with_logprobs):
        assert reason is None
        delta = choice.feed(output)
        shown += delta.text
        entries += delta.entries
        reason = delta.finish_reason
        if reason is not None:
            break
        held_back = len(shown)
        assert cut_at_first_stop(text, stops)[:held_back] == shown
        assert all(entry.offset <= len(shown) for entry in entries)
    assert shown == cut_at_first_stop(text, stops)
    assert reason == "stop"
    if with_logprobs:
        spelled = bytes(entry.token_id for entry in entries).decode(errors="replace")
        assert spelled.startswith(shown)
        assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)
    if shown == text and not any(stop in text for stop in stops):
        assert choice.generated == len(text.encode()) + 1


def test_a_stop_found_only_at_the_end_still_stops():
    choice = TextChoice(ByteTokenizer(), stops=("abcd", "bc"), wants_logprobs=False)
    (output,) = outputs("xabc", [9], with_logprobs=False)
    delta = choice.feed(output)
    assert (delta.text, delta.finish_reason) == ("xa", "stop")


def test_an_echoed_prompt_shares_offsets_with_what_follows():
    tokenizer = ByteTokenizer()
    echoed = EchoedPrompt(tokenizer, list("né".encode()), "né", wants_logprobs=True)
    choice = TextChoice(tokenizer, stops=(), wants_logprobs=True, echoed=echoed)
    output = EngineOutput(
        request_id="r",
        token_ids=(65, 66),
        logprobs=(logprobs_of(65, 0), logprobs_of(66, 0)),
        cached_tokens=0,
        finish_reason=FinishReason.LENGTH,
        prompt_logprobs=tuple(logprobs_of(t, 0) for t in "né".encode()[1:]),
    )
    delta = choice.feed(output)
    assert delta.text == "néAB"
    assert [entry.offset for entry in delta.entries] == [0, 1, 1, 2, 3]
    assert delta.entries[0].logprob is None
