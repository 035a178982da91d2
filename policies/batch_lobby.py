"""Where jobs wait for a batch, where whole batches are run (`policies.batching`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Generic

from policies.batching import Batching
from policies.meter import Meter
from policies.waiting_line import JobT, WaitingLine


class BatchLobby(Generic[JobT]):
    """Those of whom no batch has been made yet. `len` may be asked from any thread."""

    def __init__(self, batching: Batching, meter: Meter) -> None:
        self._batching = batching
        self._line = WaitingLine[JobT](meter)

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[JobT]:
        return iter(self._line)

    def add(self, job: JobT) -> None:
        """It waits for a batch."""
        self._line.add(job)

    def remove(self, job: JobT) -> bool:
        """It waits no longer; False if it did not."""
        return self._line.remove(job)

    def take_batch(self, now_s: float, running: int) -> list[JobT]:
        """The batch that is made now, which is here no longer; [] if it is not time. `running` of
        the last one have not ended.

        Its members are those whose turn it is, by what their flows were charged up to now.
        """
        if running:
            return []
        size = self._batching.admits(now_s, len(self._line), self._eldest_s(), 0)
        batch = list(islice(self._line.in_order(now_s), size))
        for job in batch:
            self._line.remove(job)
        return batch

    def next_due_s(self, running: int) -> float | None:
        """When a batch is made though nobody comes or ends; see `Batching.next_due_s`."""
        if running:
            return None
        return self._batching.next_due_s(len(self._line), self._eldest_s(), 0)

    def _eldest_s(self) -> float:
        return min((each.arrived_s for each in self._line), default=0.0)
