"""Traffic that was recorded, sent again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from loadtest.plan import Session
from loadtest.traces.description import describe
from loadtest.traces.own import read_chats
from loadtest.traces.reading import read_trace, trace_path
from loadtest.traces.scaling import Scale, Scaled, TooLong, scaled
from loadtest.vocabulary import Vocabulary
from loadtest.workloads.base import Workload
from loadtest.workloads.replay import replayed


class _Recorded(Workload):
    """Sent at recorded times, all of it."""

    @property
    def usual_requests(self) -> None:
        """All."""
        return None

    @property
    def usual_arrivals(self) -> None:
        """As recorded."""
        return None


class TraceReplay(_Recorded):
    """Prompts made anew from lengths and blocks. `Scale` says what its parameters mean."""

    name = "trace"
    help = "a trace's requests at their times: Mooncake JSONL, Azure CSV or one's own JSONL"

    file: str = Field(
        default="mooncake", description="a file, or mooncake: the piece that is shipped"
    )
    format: Literal["auto", "mooncake", "azure", "own"] = Field(
        default="auto", description="of the file"
    )
    speed: float = Field(default=1.0, gt=0, description="2 is twice as fast")
    rate: float | None = Field(
        default=None, gt=0, description="requests per second, instead of a speed"
    )
    length: float = Field(
        default=1.0, gt=0, description="prompts and blocks are so many times as long"
    )
    output_length: float | None = Field(
        default=None, gt=0, description="answers are so many times as long; unset: as prompts are"
    )
    longest_tokens: int | None = Field(
        default=None, ge=1, description="what prompt and answer may have together"
    )
    too_long: TooLong = Field(default="drop", description="drop what is longer, or cut its prompt")
    spread: bool = Field(
        default=False, description="lay out what came at one tick of the clock until the next"
    )

    @model_validator(mode="after")
    def _one_pace(self) -> Self:
        if self.rate is not None and self.speed != 1.0:
            raise ValueError("rate and speed cannot both be given")
        return self

    def trace(self) -> Scaled:
        """To scale, with how much was dropped and cut. Raises TraceError for the file, and
        ValueError for a rate where all requests came at once."""
        return self._scaled

    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:
        """One for each request, at its time. Raises as `trace` does."""
        return replayed(self._scaled.trace, seed, vocabulary)

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not fit."""
        found = self._scaled
        counted = ((found.dropped, "requests dropped as too long"), (found.cut, "prompts cut"))
        return tuple(f"{number} {what}" for number, what in counted if number)

    @cached_property
    def _scaled(self) -> Scaled:
        trace = read_trace(self.file, self.format)
        speed = self.speed
        if self.rate is not None:
            was = describe(trace).rate_rps
            if was is None:
                raise ValueError(f"{self.file}: all requests came at once, at no rate")
            speed = self.rate / was
        return scaled(
            trace,
            Scale(
                speed=speed,
                length=self.length,
                output_length=self.output_length,
                longest_tokens=self.longest_tokens,
                too_long=self.too_long,
                spread=self.spread,
            ),
        )


class Chats(_Recorded):
    """Real texts from a file in forebay's own format (`loadtest.traces.own`)."""

    name = "chats"
    help = "chats that were recorded with their texts, from one's own JSONL"

    file: str = Field(description="JSONL with messages or a prompt on each line")
    speed: float = Field(default=1.0, gt=0, description="2 is twice as fast")
    exact: bool = Field(
        default=True, description="whether answers have exactly their recorded length"
    )

    @property
    def ever_new(self) -> bool:
        """No."""
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """What that comes to."""
        return ("the same texts in every run, of which a cache may have kept what came before",)

    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:  # noqa: ARG002
        """The same for every seed: these texts are as they are. Raises TraceError."""
        for session in read_chats(trace_path(self.file)).sessions:
            turns = tuple(replace(turn, exact=self.exact) for turn in session.turns)
            yield replace(session, turns=turns, start_s=session.start_s / self.speed)
