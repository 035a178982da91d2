"""Several choices' outputs as one stream, whatever comes at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from engine.request import EngineOutput, EngineRequest, FinishReason
from engine.sampling_params import SamplingParams
from gateway.choice import Choice, outputs_of
from gateway.replica import ReplicaUnavailable
from gateway.text_choice import TextChoice
from tests.gateway.fakes import ByteTokenizer

REQUEST = EngineRequest("r", [1], SamplingParams(max_tokens=99, temperature=0.0), None)


def output(text: bytes, reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput("r", tuple(text), (), 0, reason)


class Script:
    """Outputs that all are there when one looks; then the replica is lost, or the end."""

    def __init__(self, *outputs: EngineOutput, lost: bool = False) -> None:
        self._outputs = outputs
        self._lost = lost

    async def __aiter__(self) -> AsyncIterator[EngineOutput]:
        for each in self._outputs:
            yield each
        if self._lost:
            raise ReplicaUnavailable("lost")


def choices_of(*scripts: Script) -> list[Choice]:
    """A choice of each, all with the stop string STOP."""
    choices = []
    for index, script in enumerate(scripts):
        text = TextChoice(ByteTokenizer(), stops=("STOP",), wants_logprobs=False)
        choice = Choice(index, 0, REQUEST, text)
        choice.outputs = script  # type: ignore[assignment] # iterated over, and nothing else
        choices.append(choice)
    return choices


async def consumed(choices: list[Choice]) -> dict[int, list[tuple[str, str | None]]]:
    """Each choice's deltas."""
    deltas: dict[int, list[tuple[str, str | None]]] = {choice.index: [] for choice in choices}
    async with aclosing(outputs_of(choices)) as batches:
        async for batch in batches:
            for choice, each in batch:
                delta = await choice.advance(each)
                deltas[choice.index].append((delta.text, delta.finish_reason))
            await asyncio.sleep(0)
    return deltas


async def test_nothing_follows_a_stop_string_that_came_together_with_more() -> None:
    stopped = Script(output(b"a"), output(b"bSTOP"), output(b"c"), output(b"dSTOP"), output(b"e"))
    other = Script(output(b"x"), output(b"y", FinishReason.LENGTH))
    deltas = await consumed(choices_of(stopped, other))
    for index, whole in ((0, ("ab", "stop")), (1, ("xy", "length"))):
        texts = "".join(text for text, _ in deltas[index])
        ends = [reason for _, reason in deltas[index] if reason is not None]
        assert (texts, ends) == (whole[0], [whole[1]])


async def test_what_comes_together_is_one_output() -> None:
    choices = choices_of(Script(output(b"a"), output(b"b"), output(b"c", FinishReason.LENGTH)))
    choices += choices_of(Script(output(b"d", FinishReason.LENGTH)))
    choices[1].index = 1
    assert await consumed(choices) == {0: [("abc", "length")], 1: [("d", "length")]}


async def test_a_replica_lost_behind_the_end_of_a_choice_is_no_loss() -> None:
    lost = Script(output(b"a STOP"), lost=True)
    whole = Script(output(b"x", FinishReason.LENGTH))
    assert await consumed(choices_of(lost, whole)) == {0: [("a ", "stop")], 1: [("x", "length")]}


async def test_a_loss_comes_behind_what_was_there_before_it() -> None:
    choices = choices_of(Script(output(b"ab"), lost=True), Script(output(b"xy")))
    with pytest.raises(ReplicaUnavailable):
        await consumed(choices)
    assert [choice.text.generated for choice in choices] == [2, 2]
