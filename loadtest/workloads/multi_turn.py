"""Chats that go on for several turns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pydantic import Field

from loadtest.plan import Message, Session, Turn
from loadtest.vocabulary import Vocabulary
from loadtest.workloads.arrivals import gamma
from loadtest.workloads.base import Workload
from loadtest.workloads.randomness import drawer
from loadtest.workloads.text import text


class MultiTurn(Workload):
    """Every turn sends the whole chat so far, the server's own answers included. All chats have
    one system prompt. Lengths are words, about as many tokens: usage says how many."""

    name = "multi-turn"
    help = "chats whose history grows by the real answers"

    turns: int = Field(default=5, ge=1, description="questions of a chat")
    system_words: int = Field(default=200, ge=1, description="length of the system prompt")
    user_words: int = Field(default=60, ge=1, description="length of each question")
    output_tokens: int = Field(default=64, ge=1, description="length of each answer")
    think_s: float = Field(
        default=1.0, ge=0, description="mean time from an answer to the next question"
    )
    think_cv: float = Field(default=0.0, ge=0, description="its coefficient of variation (gamma)")
    exact: bool = Field(default=True, description="whether answers have exactly that length")

    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:  # noqa: ARG002
        """Without end. Texts have no use for the vocabulary."""
        base = f"{self.name}/{seed}"
        system: Message = {"role": "system", "content": text(f"{base}/system", self.system_words)}
        draw = drawer(f"{base}/think")
        for number in count():
            yield Session(
                tuple(
                    Turn(
                        self.output_tokens,
                        messages=(*([] if turn else [system]), self._question(base, number, turn)),
                        label=f"turn {turn + 1}",
                        think_s=gamma(self.think_s, self.think_cv, draw) if turn else 0.0,
                        exact=self.exact,
                    )
                    for turn in range(self.turns)
                )
            )

    def _question(self, base: str, chat: int, turn: int) -> Message:
        return {"role": "user", "content": text(f"{base}/{chat}/{turn}", self.user_words)}
