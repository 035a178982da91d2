"""What a workload is: parameters that are checked, and the sessions that come of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from loadtest.plan import Session
from loadtest.vocabulary import Vocabulary
from loadtest.workloads.arrivals import Arrivals, Closed

Api = Literal["completions", "chat"]
"""How a prompt is sent: as token ids, or as a chat of so many words instead of tokens."""


class Workload(BaseModel, ABC):
    """Its fields are its parameters.

    Its texts are named by `name`, seed and what they are: equal arguments give equal prompts in any
    process, and two seeds share none (`ever_new`), so that nothing is cached of a run before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: ClassVar[str]
    help: ClassVar[str]
    """What it is, in one line."""

    @abstractmethod
    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:
        """What is sent, in order; without end where `usual_requests` is not all there is. Prompts
        of token ids keep to the vocabulary. `start_s` is 0, or the time that was recorded."""

    @property
    def usual_requests(self) -> int | None:
        """How many requests are sent if nothing else is said; None: all there are."""
        return 100

    @property
    def usual_arrivals(self) -> Arrivals | None:
        """When sessions begin if nothing else is said; None: each at its recorded time."""
        return Closed(8)

    @property
    def ever_new(self) -> bool:
        """Whether two seeds share no prompt."""
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures has to know, beside the parameters."""
        return ()

    def title(self) -> str:
        """It, its parameters and notes in one line. Raises as `sessions` does."""
        said = ", ".join(
            f"{name}={value}" for name, value in self.model_dump().items() if value is not None
        )
        return ", ".join((f"{self.name} ({said})" if said else self.name, *self.notes))
