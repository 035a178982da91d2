"""What the gateway adds to its engine: time per call, and stalls of its event loop."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from loadtest.bench.campaign import CampaignError
from loadtest.bench.closed_loop import run_closed_loop
from loadtest.bench.completion import Failure, completion_body, refusal
from loadtest.bench.workloads import W2, Workload
from loadtest.stats.distribution import Distribution
from loadtest.target import Target
from loadtest.wire.connection import Answer, Connection, Endpoint, ExchangeError, connect, fetch

ENGINE_TIME_HEADER = "x-forebay-engine-ms"
"""On answers that are not streamed: milliseconds from submission to the last token."""
LAG_HISTOGRAM = "forebay_event_loop_lag_seconds"

_STREAMS = replace(W2, name="watched-W2")
"""W2 with prompts of its own, that no other part finds in the cache or leaves there."""
_CALLS = Workload("gateway", "one call at a time, 32 in, 4 out", 1, 200, 0, 32, 4)
_BUCKET = re.compile(rf'{LAG_HISTOGRAM}_bucket{{.*?le="([^"]+)".*?}}\s+(\S+)')


@dataclass(frozen=True, slots=True)
class LoopLag:
    """How late an event loop ran its timers: cumulative counts by upper bound in seconds."""

    counts: tuple[tuple[float, float], ...]

    @classmethod
    def parse(cls, page: str) -> LoopLag:
        """From a metrics page in Prometheus' text format. Raises CampaignError if it is not on
        the page."""
        counts = tuple(
            (float(match[1].replace("+Inf", "inf")), float(match[2]))
            for match in _BUCKET.finditer(page)
        )
        if not counts:
            raise CampaignError(f"/metrics has no {LAG_HISTOGRAM}")
        return cls(counts)

    def since(self, before: LoopLag) -> LoopLag:
        """What was added after `before`."""
        earlier = dict(before.counts)
        return LoopLag(tuple((bound, count - earlier[bound]) for bound, count in self.counts))

    @property
    def timers(self) -> int:
        """How many timers were watched."""
        return int(self.counts[-1][1])

    def later_than(self, bound_s: float) -> int:
        """How many timers were later than a bound; rounded up to the next bound there is."""
        at = max((one for one in self.counts if one[0] <= bound_s), default=(0.0, 0.0))
        return self.timers - int(at[1])

    @property
    def worst_at_most_s(self) -> float:
        """The least bound that no timer passed; infinity if one passed them all."""
        return next((bound for bound, count in self.counts if count == self.timers), math.inf)


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """`added_ms` is a call's time less its engine's; `lag` is the event loop's under W2."""

    call_ms: Distribution
    engine_ms: Distribution
    added_ms: Distribution
    lag: LoopLag


async def measure_gateway(target: Target, seed: int) -> GatewayCost:
    """Non-streaming calls one at a time, then W2 with an eye on the event loop.

    Raises CampaignError if a call fails, or the server does not tell its engine's time or lag.
    """
    calls, engine = await _timed_calls(target, seed)
    before = await _read_lag(target.endpoint)
    outcome = await run_closed_loop(target, _STREAMS, seed)
    for result in outcome.results:
        if isinstance(result, Failure):
            raise CampaignError(f"W2: {result.reason}")
    lag = (await _read_lag(target.endpoint)).since(before)
    added = [call - own for call, own in zip(calls, engine, strict=True)]
    distributions = [Distribution.of(values) for values in (calls, engine, added)]
    call_ms, engine_ms, added_ms = (one for one in distributions if one is not None)
    return GatewayCost(call_ms, engine_ms, added_ms, lag)


async def _timed_calls(target: Target, seed: int) -> tuple[list[float], list[float]]:
    """Each call's milliseconds on the client's clock, and the engine's own."""
    calls, engine = [], []
    async with connect(target.endpoint) as connection:
        for send in _CALLS.sends(seed, target.vocabulary):
            body = completion_body(target.model, send.prompt, _CALLS.output_tokens, stream=False)
            answer = await _call(connection, target, body)
            calls.append((answer.ended_at_s - answer.sent_at_s) * 1e3)
            engine.append(_engine_ms(answer))
    return calls, engine


async def _call(connection: Connection, target: Target, body: bytes) -> Answer:
    request = target.endpoint.request("POST", target.completions_path, body)
    try:
        answer = await connection.exchange(request, target.timeout_s)
    except ExchangeError as error:
        raise CampaignError(f"{target.name}: {error}") from None
    if answer.status != 200 or not answer.whole:
        raise CampaignError(f"{target.name}: {refusal(answer)}")
    return answer


def _engine_ms(answer: Answer) -> float:
    value = answer.headers.get(ENGINE_TIME_HEADER)
    try:
        return float(value or "")
    except ValueError:
        raise CampaignError(f"the answer has no number in {ENGINE_TIME_HEADER}") from None


async def _read_lag(endpoint: Endpoint) -> LoopLag:
    try:
        answer = await fetch(endpoint, "GET", "/metrics")
    except ExchangeError as error:
        raise CampaignError(f"/metrics: {error}") from None
    if answer.status != 200:
        raise CampaignError(f"/metrics: {refusal(answer)}")
    return LoopLag.parse(answer.body.decode())
