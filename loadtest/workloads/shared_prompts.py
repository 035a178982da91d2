"""System prompts that many requests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pydantic import Field

from loadtest.plan import Session
from loadtest.vocabulary import Vocabulary
from loadtest.workloads.base import Api, Workload
from loadtest.workloads.parts import Part, turn_of
from loadtest.workloads.randomness import drawer
from loadtest.workloads.zipf import ZipfChoice


class SharedPrompts(Workload):
    """A prompt is its group's prefix and tokens of its own. What is labelled "first" begins with a
    prefix that was not sent before in this run."""

    name = "shared-prompts"
    help = "system prompts that many requests begin with, some more often than others"

    groups: int = Field(default=8, ge=1, description="how many system prompts there are")
    prefix_tokens: int = Field(default=512, ge=1, description="length of each of them")
    zipf: float = Field(default=0.0, ge=0, description="exponent of their popularity; 0: all alike")
    own_tokens: int = Field(default=64, ge=1, description="length of what is each request's own")
    output_tokens: int = Field(default=32, ge=1, description="length of the answer")
    api: Api = Field(default="completions", description="completions: token ids; chat: words")
    exact: bool = Field(default=True, description="whether answers have exactly that length")

    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:
        """Without end."""
        base = f"{self.name}/{seed}"
        groups = ZipfChoice(self.groups, self.zipf, drawer(f"{base}/groups"))
        seen = set[int]()
        for number in count():
            group = groups.next()
            parts = (
                Part(f"{base}/prefix/{group}", self.prefix_tokens, "system"),
                Part(f"{base}/own/{number}", self.own_tokens),
            )
            label = "again" if group in seen else "first"
            seen.add(group)
            turn = turn_of(
                parts,
                vocabulary,
                api=self.api,
                output_tokens=self.output_tokens,
                exact=self.exact,
                label=label,
            )
            yield Session((turn,))
