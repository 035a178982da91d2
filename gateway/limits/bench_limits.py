"""What limits cost: `python -m gateway.limits.bench_limits`.

For a tenant with every kind of limit, on itself, its key and its model, it prints the microseconds
of reserving, and of settling and giving the place back: in this process's memory, and in a Redis
of its own over a unix socket, one request at a time and 32 at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from time import perf_counter

from gateway.embedded_redis import embedded_redis
from gateway.limits.limiter import Limiter
from gateway.limits.opening import open_limiter
from gateway.state_dir import StateDir
from gateway.tenants import Caller, KeyFacts, Tenant
from policies.limits import Demand, Limits

_REQUESTS = 5000
_AT_ONCE = 32
_REDIS_BYTES = 64 << 20

_LIMITS = Limits(10**6, 10**9, 10**4, 10**15, "day")
_CALLER = Caller(
    Tenant("acme", limits=_LIMITS, model_limits={"m": _LIMITS}), KeyFacts("key-1", _LIMITS)
)
_DEMAND = Demand(10, 200, 1000, 30_000)


class _Times:
    def __init__(self) -> None:
        self.reserve_s: list[float] = []
        self.end_s: list[float] = []


async def _nothing_spent(*_: object) -> int:
    return 0


async def _ask(limiter: Limiter, times: _Times, requests: int) -> None:
    for _ in range(requests):
        began_s = perf_counter()
        reservation = await limiter.reserve(_CALLER, "m", _DEMAND)
        reserved_s = perf_counter()
        with reservation:
            reservation.settle(100, 2000)
        times.reserve_s.append(reserved_s - began_s)
        times.end_s.append(perf_counter() - reserved_s)
        await asyncio.sleep(0)  # a gateway has other things to do between two requests


async def _measure(url: str | None, requests: int, at_once: int) -> tuple[_Times, float]:
    times = _Times()
    async with open_limiter(
        url, spent=_nothing_spent, gateways=lambda: 1, timeout_s=2.0
    ) as limiter:
        await _ask(limiter, _Times(), max(1, requests // 10))
        began_s = perf_counter()
        await asyncio.gather(*[_ask(limiter, times, requests // at_once) for _ in range(at_once)])
        took_s = perf_counter() - began_s
        if limiter.degraded:
            raise RuntimeError("Redis did not count")
    return times, len(times.reserve_s) / took_s


def _say(name: str, times: _Times, per_s: float) -> None:
    sys.stdout.write(
        f"{name}: reserve {_percentiles(times.reserve_s)}, settle {_percentiles(times.end_s)}, "
        f"{per_s:,.0f} requests/s\n"
    )


def _percentiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (ordered[int(share * (len(ordered) - 1))] * 1e6 for share in (0.5, 0.99))
    return f"p50 {p50:.0f} us p99 {p99:.0f} us"


def main(requests: int = _REQUESTS) -> None:
    """Print a line for each way."""
    _say("local", *asyncio.run(_measure(None, requests, 1)))
    with tempfile.TemporaryDirectory() as directory:
        environ = {**os.environ, "FOREBAY_STATE_DIR": directory}
        with embedded_redis(StateDir.open(environ), _REDIS_BYTES, environ) as url:
            if url is None:
                return
            for at_once in (1, _AT_ONCE):
                name = f"Redis, {at_once} at once"
                _say(name, *asyncio.run(_measure(url, requests, at_once)))


if __name__ == "__main__":
    main()
