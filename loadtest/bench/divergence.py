"""How often bfloat16 would choose another token than float32, on the same weights.

Two figures, over the prompts below, greedy: the share of answers whose text differs, which is what
a user sees and grows with length; and, with both models reading the same text, the share of
positions at which they rate another token first, which is what the number format itself does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from loadtest.bench.campaign import CampaignError, Tell
from loadtest.bench.completion import refusal
from loadtest.forebay_server import MODEL, RunningServer, running_forebay
from loadtest.wire.connection import Connection, ExchangeError, connect

OUTPUT_TOKENS = 64
_TIMEOUT_S = 120.0
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics state that",
    "Q: What is 17 * 3?\nA:",
    "Dear hiring manager,\n\nI am writing to",
    "SELECT name, COUNT(*) FROM orders",
    "Water boils at 100 degrees Celsius because",
    "Photosynthesis is the process by which",
    "To bake a loaf of bread you need",
    "The quick brown fox",
    "In 1969, Neil Armstrong",
    "import numpy as np\n\ndef softmax(x):\n",
    "The difference between a list and a tuple in Python is",
    "Shakespeare wrote many plays, among them",
    "A haiku about autumn:\n",
    "The stock market fell today after",
    "My favourite recipe for soup begins with",
    "Rivers carve valleys by",
    "The patient was admitted with",
)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Counts over all prompts; `positions` are those of the float32 answers."""

    answers: int
    answers_that_differ: int
    positions: int
    positions_that_differ: int


@dataclass(frozen=True, slots=True)
class _Readings:
    """Of one server: its own answers, and what it rates first at each position of given texts."""

    answers: list[str]
    firsts: list[list[str]]


@dataclass(frozen=True, slots=True)
class _Choice:
    """An answer; with log-probabilities, where each token begins and what was rated there."""

    text: str
    offsets: Sequence[int]
    tops: Sequence[dict[str, float] | None]

    def firsts_after(self, characters: int) -> list[str]:
        """What was rated first at each position whose token begins past so many characters."""
        return [
            max(top, key=top.__getitem__)
            for offset, top in zip(self.offsets, self.tops, strict=True)
            if top and offset >= characters
        ]


async def measure_divergence(tell: Tell) -> Divergence:
    """Start forebay in each format, one after the other, and compare.

    Raises CampaignError if either does not start or answer.
    """
    tell("forebay in float32: its answers")
    async with running_forebay({"FOREBAY_MODELS__0__DTYPE": "float32"}) as server:
        exact = await _read(server, None)
    tell("forebay in bfloat16: its answers, and what it makes of the others")
    async with running_forebay({"FOREBAY_MODELS__0__DTYPE": "bfloat16"}) as server:
        rounded = await _read(server, exact.answers)
    return compare(exact.answers, exact.firsts, rounded.answers, rounded.firsts)


def compare(
    exact_answers: Sequence[str],
    exact_firsts: Sequence[Sequence[str]],
    answers: Sequence[str],
    firsts: Sequence[Sequence[str]],
) -> Divergence:
    """Count what differs. Raises ValueError if the two did not read the same positions."""
    pairs = [
        pair
        for exact, other in zip(exact_firsts, firsts, strict=True)
        for pair in zip(exact, other, strict=True)
    ]
    return Divergence(
        answers=len(exact_answers),
        answers_that_differ=sum(a != b for a, b in zip(exact_answers, answers, strict=True)),
        positions=len(pairs),
        positions_that_differ=sum(exact != other for exact, other in pairs),
    )


async def _read(server: RunningServer, texts: Sequence[str] | None) -> _Readings:
    """This server's answers, and its first choices along `texts` (None: along its own answers)."""
    async with connect(server.endpoint) as connection:
        answers = [
            (await _complete(connection, server, prompt, max_tokens=OUTPUT_TOKENS)).text
            for prompt in PROMPTS
        ]
        firsts = []
        for prompt, text in zip(PROMPTS, texts or answers, strict=True):
            scored = await _complete(
                connection, server, prompt + text, max_tokens=0, echo=True, logprobs=1
            )
            firsts.append(scored.firsts_after(len(prompt)))
    return _Readings(answers, firsts)


async def _complete(
    connection: Connection, server: RunningServer, prompt: str, **fields: object
) -> _Choice:
    body = orjson.dumps({"model": MODEL, "prompt": prompt, "temperature": 0, **fields})
    request = server.endpoint.request("POST", "/v1/completions", body)
    try:
        answer = await connection.exchange(request, _TIMEOUT_S)
    except ExchangeError as error:
        raise CampaignError(f"forebay: {error}") from None
    if answer.status != 200:
        raise CampaignError(f"forebay: {refusal(answer)}")
    choice = orjson.loads(answer.body)["choices"][0]
    logprobs = choice["logprobs"] or {}
    return _Choice(
        choice["text"], logprobs.get("text_offset", ()), logprobs.get("top_logprobs", ())
    )
