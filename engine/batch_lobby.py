"""Where sequences wait for a batch, in an engine that runs whole batches to be compared with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from engine.sequence import Sequence
from policies.batching import Batching
from policies.meter import Meter
from policies.waiting_line import WaitingLine


class BatchLobby:
    """Those of whom no batch has been made yet. Step-loop thread only, but for `len`."""

    def __init__(self, batching: Batching, meter: Meter) -> None:
        self._batching = batching
        self._line = WaitingLine[Sequence](meter)

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, sequence: Sequence) -> None:
        """It waits for a batch."""
        self._line.add(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """It waits no longer; False if it did not."""
        return self._line.remove(sequence)

    def take_batch(self, now_s: float, running: int) -> list[Sequence]:
        """The batch that is made now, which is here no longer; [] if it is not time. `running` of
        the last one have not ended.

        Its members are those whose turn it is, by what their flows were charged up to now.
        """
        size = self._batching.admits(now_s, len(self._line), self._eldest_s(), running)
        if not size:
            return []
        batch = list(islice(self._line.in_order(now_s), size))
        for sequence in batch:
            self._line.remove(sequence)
        return batch

    def next_due_s(self, running: int) -> float | None:
        """When a batch is made though nobody comes or ends; see `Batching.next_due_s`."""
        return self._batching.next_due_s(len(self._line), self._eldest_s(), running)

    def _eldest_s(self) -> float:
        return min((each.arrived_s for each in self._line), default=0.0)
