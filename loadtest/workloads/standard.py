"""The standard workloads: the very prompts that `make bench` sends for the same seed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import groupby
from typing import ClassVar

from loadtest.bench.workloads import W1, W2, W3, W4
from loadtest.bench.workloads import Workload as Definition
from loadtest.plan import Session, Turn
from loadtest.vocabulary import Vocabulary
from loadtest.workloads.arrivals import Arrivals, Closed
from loadtest.workloads.base import Workload


class _Standard(Workload):
    """Without parameters. What is sent in several passes is a session of as many turns."""

    definition: ClassVar[Definition]

    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:
        """One for each prompt; they end with the definition's number."""
        sends = self.definition.sends(seed, vocabulary)
        for prompt, passes in groupby(sends, key=lambda send: send.prompt):
            tokens = array("I", prompt)
            yield Session(
                tuple(
                    Turn(self.definition.output_tokens, tokens=tokens, label=each.pass_name)
                    for each in passes
                )
            )

    @property
    def usual_requests(self) -> None:
        """All."""
        return None

    @property
    def usual_arrivals(self) -> Arrivals:
        """By definition."""
        return Closed(self.definition.concurrency)


class StandardW1(_Standard):
    """W1."""

    name = W1.name
    help = W1.title
    definition = W1


class StandardW2(_Standard):
    """W2."""

    name = W2.name
    help = W2.title
    definition = W2


class StandardW3(_Standard):
    """W3."""

    name = W3.name
    help = W3.title
    definition = W3


class StandardW4(_Standard):
    """W4."""

    name = W4.name
    help = W4.title
    definition = W4
