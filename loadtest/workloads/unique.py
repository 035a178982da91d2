"""Prompts of which nothing is shared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pydantic import Field

from loadtest.plan import Session
from loadtest.vocabulary import Vocabulary
from loadtest.workloads.base import Api, Workload
from loadtest.workloads.parts import Part, turn_of
from loadtest.workloads.randomness import drawer


class Unique(Workload):
    """The worst case of every cache: what it keeps is never asked for."""

    name = "unique"
    help = "no two prompts share anything: a cache's worst case"

    prompt_tokens: int = Field(default=512, ge=1, description="length of each prompt")
    output_tokens: int = Field(default=32, ge=1, description="length of the answer")
    api: Api = Field(default="completions", description="completions: token ids; chat: words")
    exact: bool = Field(default=True, description="whether answers have exactly that length")

    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:
        """Without end."""
        for number in count():
            parts = (Part(f"{self.name}/{seed}/{number}", self.prompt_tokens),)
            turn = turn_of(
                parts,
                vocabulary,
                api=self.api,
                output_tokens=self.output_tokens,
                exact=self.exact,
            )
            yield Session((turn,))


class MixedLengths(Workload):
    """Short requests among a few long ones, labelled so: what one waits for the other."""

    name = "mixed-lengths"
    help = "many short requests among a few long ones; no two prompts share anything"

    long_share: float = Field(default=0.1, ge=0, le=1, description="share of long requests")
    short_prompt_tokens: int = Field(default=64, ge=1, description="length of a short prompt")
    short_output_tokens: int = Field(default=16, ge=1, description="length of its answer")
    long_prompt_tokens: int = Field(default=512, ge=1, description="length of a long prompt")
    long_output_tokens: int = Field(default=200, ge=1, description="length of its answer")
    api: Api = Field(default="completions", description="completions: token ids; chat: words")
    exact: bool = Field(default=True, description="whether answers have exactly that length")

    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:
        """Without end."""
        base = f"{self.name}/{seed}"
        draw = drawer(f"{base}/lengths")
        for number in count():
            label, prompt_tokens, output_tokens = (
                ("long", self.long_prompt_tokens, self.long_output_tokens)
                if draw.random() < self.long_share
                else ("short", self.short_prompt_tokens, self.short_output_tokens)
            )
            turn = turn_of(
                (Part(f"{base}/{number}", prompt_tokens),),
                vocabulary,
                api=self.api,
                output_tokens=output_tokens,
                exact=self.exact,
                label=label,
            )
            yield Session((turn,))
