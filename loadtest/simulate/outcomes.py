"""What became of each simulated request, in columns: a million of them take 80 MB."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from loadtest.columns import Coded, Columns
from loadtest.record import Outcome
from loadtest.simulate.job import SimJob

_OUTCOMES = (Outcome.BROKEN, Outcome.OK, Outcome.OVERLOADED, Outcome.REFUSED)
_BROKEN, _OK, _OVERLOADED, _REFUSED = range(4)
TOO_LONG = "longer than the cache"
_REASONS = (None, "slo", "timeout", "work", "places", "downgrade", TOO_LONG)
_UNKNOWN = float("nan")


class Outcomes:
    """Of `requests` requests. Each has exactly one end."""

    def __init__(self, requests: int, tenants: tuple[str, ...], replicas: int) -> None:
        self._tenants = tenants
        self._replicas = tuple(f"r{number}" for number in range(replicas))
        self._outcome = array("b", bytes(requests))
        self._reason = array("b", bytes(requests))
        self._tenant = _whole(requests)
        self._replica = _whole(requests)
        self._prompt_tokens = _whole(requests)
        self._output_tokens = _whole(requests)
        self._arrived_s = _times(requests)
        self._first_s = _times(requests)
        self._ended_s = _times(requests)
        self._device_tokens = _whole(requests)
        self._dram_tokens = _whole(requests)
        self._redis_tokens = _whole(requests)
        self.blocks = 0
        """Of the prompts of all that were answered."""
        self.blocks_found = 0
        self.prompt_tokens = 0
        """The same in tokens."""
        self.cached_tokens = [0, 0, 0]
        """Of these, what was found on devices, in DRAM, in Redis."""

    def done(self, job: SimJob, now_s: float) -> None:
        """Its last token is there."""
        index = job.index
        self._end(job, _OK, 0, now_s)
        assert job.first_s is not None
        assert job.tiers is not None
        self._first_s[index] = job.first_s
        self._output_tokens[index] = job.answer_tokens
        self._replica[index] = job.replica
        device, dram, redis = job.tiers
        self._device_tokens[index] = device
        self._dram_tokens[index] = dram
        self._redis_tokens[index] = redis
        cached = self.cached_tokens
        cached[0] += device
        cached[1] += dram
        cached[2] += redis
        self.prompt_tokens += job.prompt_tokens
        self.blocks += job.prompt_blocks
        self.blocks_found += job.cached_blocks

    def refused(self, job: SimJob, reason: str, now_s: float) -> None:
        """It is not let in."""
        outcome = _REFUSED if reason == TOO_LONG else _OVERLOADED
        self._end(job, outcome, _REASONS.index(reason), now_s)

    def columns(self) -> Columns:
        """All of them. Raises RuntimeError unless every one has ended."""
        outcome = np.frombuffer(self._outcome, np.int8).astype(np.int64)
        if not outcome.all():
            raise RuntimeError(f"{np.count_nonzero(outcome == _BROKEN)} requests have no end")
        requests = len(outcome)
        arrived, first, ended = (
            np.frombuffer(each, np.float64)
            for each in (self._arrived_s, self._first_s, self._ended_s)
        )
        ok = outcome == _OK
        first = np.where(ok, first, _UNKNOWN)
        tiers = [
            np.where(ok, np.frombuffer(each, np.int32), _UNKNOWN)
            for each in (self._device_tokens, self._dram_tokens, self._redis_tokens)
        ]
        nothing = np.zeros(requests, np.int64)
        return Columns(
            index=np.arange(requests),
            due_s=arrived,
            sent_s=arrived,
            ended_s=ended,
            outcome=Coded(outcome, _OUTCOMES),
            prompt_tokens=_as_whole(self._prompt_tokens),
            output_tokens=_as_whole(self._output_tokens),
            first_s=first,
            last_s=np.where(ok, ended, _UNKNOWN),
            publish_s=first,
            cached_tokens=tiers[0] + tiers[1] + tiers[2],
            device_tokens=tiers[0],
            dram_tokens=tiers[1],
            redis_tokens=tiers[2],
            tenant=Coded(_as_whole(self._tenant), self._tenants),
            label=Coded(nothing, ("all",)),
            reason=Coded(np.frombuffer(self._reason, np.int8).astype(np.int64), _REASONS),
            gaps_s=np.empty(0),
            gap_starts=np.zeros(requests + 1, np.int64),
            price_nusd=np.full(requests, _UNKNOWN),
            replica=Coded(np.where(ok, _as_whole(self._replica) + 1, 0), ("", *self._replicas)),
            stall_s=np.zeros(requests),
        )

    def _end(self, job: SimJob, outcome: int, reason: int, now_s: float) -> None:
        index = job.index
        if self._outcome[index] != _BROKEN:
            raise RuntimeError(f"request {index} has ended before")
        self._outcome[index] = outcome
        self._reason[index] = reason
        self._tenant[index] = job.tenant
        self._prompt_tokens[index] = job.prompt_tokens
        self._arrived_s[index] = job.asked_s
        self._ended_s[index] = now_s


def _whole(count: int) -> array[int]:
    return array("i", bytes(4 * count))


def _times(count: int) -> array[float]:
    return array("d", bytes(8 * count))


def _as_whole(values: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(values, np.int32).astype(np.int64)
