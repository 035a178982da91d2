"""However a request ends, it ends in the metrics and in one log line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import structlog

from cache.block import Tier
from gateway.errors import ApiError
from gateway.http_call import ClientDisconnectedError
from gateway.metrics import Metrics
from gateway.recent_requests import RecentRequests
from gateway.request import Request

_log = structlog.get_logger("forebay.request")


@contextmanager
def settled(
    request: Request, metrics: Metrics, recent: RecentRequests | None = None
) -> Iterator[None]:
    """Run the request inside; on the way out, whatever happened, settle it once.

    `recent` remembers how it met the cache; None for what never meets it.
    """
    outcome = "error"
    status: int | None = None
    try:
        yield
        outcome, status = "success", 200
    except ApiError as error:
        outcome, status = _outcome(error.status), error.status
        raise
    except (ClientDisconnectedError, asyncio.CancelledError):
        outcome = "cancelled"
        raise
    finally:
        _settle(request, metrics, outcome, status)
        if recent is not None:
            recent.note(request)


def _settle(request: Request, metrics: Metrics, outcome: str, status: int | None) -> None:
    usage = request.usage()
    receipts = request.receipts()
    e2e_s = monotonic() - request.call.started_s
    ttft_s, tpot_s = request.ttft_s(), request.tpot_s()
    tenant = request.tenant.id if request.tenant else None
    model = request.model.name if request.model else None
    metrics.request_finished(
        tenant=tenant,
        model=model,
        endpoint=request.endpoint,
        outcome=outcome,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        prompt_tokens=usage.prompt_tokens,
        cached_by_tier=usage.cached_by_tier,
        generated_tokens=usage.completion_tokens,
    )
    _log.info(
        "request",
        client=request.call.client_address(request.snapshot.settings.server.trusted_proxies),
        tenant=tenant,
        model=model,
        endpoint=request.endpoint,
        outcome=outcome,
        status=status,
        stream=request.task.generation.stream if request.task else None,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        cached_device_tokens=usage.cached_by_tier[Tier.DEVICE],
        cached_dram_tokens=usage.cached_by_tier[Tier.DRAM],
        cached_redis_tokens=usage.cached_by_tier[Tier.REDIS],
        generated_tokens=usage.completion_tokens,
        replica=", ".join(dict.fromkeys(receipt.candidate.name for receipt in receipts)) or None,
        predicted_ttft_ms=_ms(receipts[0].predicted_ttft_s) if receipts else None,
        ttft_ms=_ms(ttft_s),
        e2e_ms=_ms(e2e_s),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)


def _outcome(status: int) -> str:
    if status == 429:
        return "limited"
    if status == 503:
        return "unavailable"
    return "refused" if status < 500 else "error"
