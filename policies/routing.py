"""Which replica a request goes to: the terms in which policies decide (`routing_policies`).

Every term is a time in seconds: what waits in front, what has to be moved, what has to be computed.
There is no weight between "prefix" and "load" to be tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from policies.cost import Coefficients


class Cached(NamedTuple):
    """The beginning of a prompt that a replica is believed to have, in tokens by tier; what is in
    two tiers counts for the faster one."""

    device: int = 0
    dram: int = 0
    redis: int = 0

    @property
    def tokens(self) -> int:
        """All of it."""
        return self.device + self.dram + self.redis


NOTHING_CACHED = Cached()


class Queued(NamedTuple):
    """Of the sequences that wait, those of one priority and flow, which shares the priority with
    other flows by its `weight`; and their uncached prompt tokens. `tokens_per_s` more of them have
    come lately."""

    priority: int
    sequences: int
    tokens: int
    flow: bytes = b""
    weight: float = 1.0
    tokens_per_s: float = 0.0


class Standing(NamedTuple):
    """What is known of a replica's work now. Token counts are predictions of uncached prompt tokens
    that it has not computed yet (`pending_tokens`, in front of a newcomer); `waiting` counts the
    sequences that have no first token yet, `running` those that generate, `context_tokens` sums the
    running ones' contexts; `max_running` is how many it runs at once, `full` that it would refuse
    another.

    `queued` says how much of `waiting` and `pending_tokens` belongs to which priority and flow,
    each pair once; what it does not mention, nobody overtakes. `yielding` counts those of `running`
    that the more urgent put back into the line, as (priority, sequences). `answer_tokens` is the
    mean length of the answers generated there; 0: not known. `reuse` is the chance that what newly
    computed tokens push out of the cache there will be asked for again: 0 while it has room, 1
    where nothing is known.
    """

    pending_tokens: int = 0
    waiting: int = 0
    running: int = 0
    context_tokens: int = 0
    max_running: int = 16
    full: bool = False
    queued: tuple[Queued, ...] = ()
    answer_tokens: int = 0
    reuse: float = 1.0
    yielding: tuple[tuple[int, int], ...] = ()


class Candidate(NamedTuple):
    """A replica that could take the request."""

    name: str
    cost: Coefficients
    standing: Standing
    cached: Cached = NOTHING_CACHED


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What routing knows of a request: the length of its prompt in tokens, how many it may
    generate, and its place in the order of classes (lower is more urgent). `flow` is whose it is,
    who has the share `weight` of the priority. `due_s` is the time within which its first token was
    promised; None: whenever it comes."""

    prompt_tokens: int
    max_tokens: int = 16
    priority: int = 0
    flow: bytes = b""
    weight: float = 1.0
    due_s: float | None = None


class Prediction(NamedTuple):
    """A candidate's predicted time to first token by term, in seconds."""

    queue_s: float
    load_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        """All of it."""
        return self.queue_s + self.load_s + self.prefill_s


class RoutingPolicy(Protocol):
    """Chooses among candidates. `random` is the only source of chance; equal choices are made by
    it, so that several gateways do not herd.

    It is asked more often than something is sent: also when a request is let in, while it waits for
    that, and by whoever only wants to know. A policy that goes by its own choices before is a
    `TurnTaking` one.
    """

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate], random: Random) -> int:
        """The index of the candidate to take; there is at least one."""
        ...


class TurnTaking(RoutingPolicy, Protocol):
    """A policy that is told of what was sent where, and so need not take its choices for that."""

    def sent(self, replica: str) -> None:
        """A request is being sent to the replica of this name, whoever has chosen it."""
        ...
