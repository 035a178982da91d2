"""The standard workloads W1 to W4, and the prompts they send.

Prompts are random token ids: no tokenizer stands between two servers and the same work. Two seeds
share no prompt, so that a prefix cache is cold for every repetition that has a seed of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from loadtest.vocabulary import Vocabulary

ONLY_PASS = "all"


class Send(NamedTuple):
    """One request: the name of its pass, and its prompt."""

    pass_name: str
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop: `concurrency` clients, each sending its next request when its last is done.

    Every one of `prompts` prompts is `shared_tokens` that all of them begin with and `own_tokens`
    of its own. With several `prefixes` there are so many beginnings, and the prompts take them in
    turn. It is sent once for each of `passes`, one right after the other: more than one pass
    measures what the first leaves in the prefix cache, and needs a concurrency of 1. Every answer
    is exactly `output_tokens` long.
    """

    name: str
    title: str
    concurrency: int
    prompts: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int
    passes: tuple[str, ...] = (ONLY_PASS,)
    prefixes: int = 1

    def __post_init__(self) -> None:
        if len(self.passes) > 1 and self.concurrency != 1:
            raise ValueError(f"{self.name}: several passes need a concurrency of 1")

    @property
    def prompt_tokens(self) -> int:
        """The length of every prompt."""
        return self.shared_tokens + self.own_tokens

    def sends(self, seed: int, vocabulary: Vocabulary) -> list[Send]:
        """Every request in the order of sending; the same for the same arguments, anywhere."""
        # Seeded by a string, which Python hashes in full: neighbouring integers would do as well,
        # but then seed 1 of one workload would be a prefix of seed 1 of another.
        draw = random.Random(f"{self.name}/{seed}")
        shared = [
            _random_tokens(draw, self.shared_tokens, vocabulary) for _ in range(self.prefixes)
        ]
        prompts = [
            shared[index % self.prefixes] + _random_tokens(draw, self.own_tokens, vocabulary)
            for index in range(self.prompts)
        ]
        return [Send(name, prompt) for prompt in prompts for name in self.passes]


W1 = Workload("W1", "one stream, 128 in, 128 out", 1, 4, 0, 128, 128)
W2 = Workload("W2", "8 streams, 128 in, 128 out", 8, 32, 0, 128, 128)
W3 = Workload("W3", "16 streams, 1,024 shared + 64 own in, 32 out", 16, 64, 1024, 64, 32)
W4 = Workload("W4", "1,024 in, cold and again", 1, 3, 0, 1024, 8, ("cold", "hit"))
STANDARD = {workload.name: workload for workload in (W1, W2, W3, W4)}

WARM_UP = Workload("warm-up", "not measured", 16, 32, 0, 96, 8)
"""Touches every batch size up to 16 once: first calls allocate, compile and fault pages in."""


def _random_tokens(draw: random.Random, count: int, vocabulary: Vocabulary) -> tuple[int, ...]:
    return tuple(draw.choices(range(vocabulary.first, vocabulary.end), k=count))
