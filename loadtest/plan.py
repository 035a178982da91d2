"""What is to be sent, to whom and when: the terms between workloads and the client that sends them.

A load is made of sessions, and a session of turns: a turn is sent when the answer to the one before
has ended and its think time has passed, as a person or an agent would. Most workloads have sessions
of one turn. Sessions begin when their time has come, however many are unanswered (open loop), or
when one of so many clients is free (closed loop).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.service_class import ServiceClass
from policies.slo import NO_SLO, Slo

Message = Mapping[str, Any]
"""One of a chat's messages as the API has it."""

SOLE_TENANT = "loadtest"


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """One of those in whose name requests are sent. `key_env` names the environment variable that
    holds its key; None: the target's own key."""

    name: str = SOLE_TENANT
    key_env: str | None = None
    slo: Slo = NO_SLO
    service_class: ServiceClass = ServiceClass.STANDARD
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Either `tokens`, the whole prompt of a completion as token ids (an `array` or
    another compact sequence), or `messages`, which are added to the chat so far, the answers to
    earlier turns included.

    The answer has `output_tokens` tokens at most, and exactly so many if `exact` (`ignore_eos`, a
    finish by length). `label` groups what is reported together ("cold", "hit", "turn 2"). `fields`
    are more fields of the body, such as tools. `think_s` passes between the end of the answer
    before and this turn's sending. `expected_text` is what a greedy answer has to say, where that
    is known.
    """

    output_tokens: int
    tokens: Sequence[int] | None = None
    messages: tuple[Message, ...] = ()
    label: str = "all"
    think_s: float = 0.0
    exact: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    expected_text: str | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (not self.messages):
            raise ValueError("a turn has either tokens or messages")
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens must be at least 1, not {self.output_tokens}")


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other, for one tenant. In an open loop it begins `start_s` after the
    run does; in a closed loop when its turn comes."""

    turns: tuple[Turn, ...]
    tenant: str = SOLE_TENANT
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Everything that is sent in one run. `concurrency` clients take the sessions in turn (closed
    loop); None: each begins at its `start_s` (open loop). `title` says in one line what it is."""

    title: str
    sessions: Sequence[Session]
    tenants: tuple[TenantPlan, ...] = (TenantPlan(),)
    concurrency: int | None = None

    @property
    def requests(self) -> int:
        """How many requests that are."""
        return sum(len(session.turns) for session in self.sessions)
