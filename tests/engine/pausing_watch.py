"""What happens in steps beside one that lies aside, counted for tests that want it to happen."""

from __future__ import annotations

from collections import Counter

from engine.engine import Engine
from engine.scheduler import Chunk


def watch_beside(engine: Engine, seen: Counter[str]) -> None:
    """Before the engine starts. Counts streams of the step that lies aside that have `gone on`
    beside it, those that `ended` with that by their number of tokens, and each `slot` of those that
    is somebody else's before the step is over."""
    scheduler = engine._scheduler
    schedule_beside = scheduler.schedule_beside
    given_up: set[int | None] = set()

    def watched(priority: int, tokens: int) -> list[Chunk]:
        aside = set(scheduler._aside or ())
        chunks = schedule_beside(priority, tokens)
        if not scheduler._gone_on:
            given_up.clear()
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence in aside:
                seen["gone on"] += 1
                if sequence.generated + 1 == sequence.request.params.max_tokens:
                    seen["ended"] += 1
                    given_up.add(sequence.slot)
            elif sequence.slot in given_up:
                given_up.remove(sequence.slot)
                seen["slot"] += 1
        return chunks

    scheduler.schedule_beside = watched  # type: ignore[method-assign]  # it is only looked at
