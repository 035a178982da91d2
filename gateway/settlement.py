"""However a request ends, it ends in the metrics and in one log line."""

from __future__ import annotations

import asyncio
from time import monotonic
from types import TracebackType

import structlog

from cache.block import Tier
from gateway.errors import ApiError
from gateway.http_call import ClientDisconnectedError
from gateway.metrics import Metrics
from gateway.recent_requests import RecentRequests
from gateway.request import Request

_log = structlog.get_logger("forebay.request")


class settled:  # noqa: N801 - it is used as a statement
    """Run the request inside; on the way out, whatever happened, settle it once."""

    __slots__ = ("_metrics", "_recent", "_request")

    def __init__(
        self, request: Request, metrics: Metrics, recent: RecentRequests | None = None
    ) -> None:
        """`recent` remembers how it met the cache; None for what never meets it."""
        self._request = request
        self._metrics = metrics
        self._recent = recent

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        outcome, status = _outcome(error)
        _settle(self._request, self._metrics, outcome, status)
        if self._recent is not None:
            self._recent.note(self._request)


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
        stream=request.streams(),
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


def _outcome(error: BaseException | None) -> tuple[str, int | None]:
    """A request's outcome by what ended it, and its status if it has one."""
    if error is None:
        return "success", 200
    if isinstance(error, ApiError):
        return _outcome_of(error.status), error.status
    if isinstance(error, ClientDisconnectedError | asyncio.CancelledError):
        return "cancelled", None
    return "error", None


def _outcome_of(status: int) -> str:
    if status == 429:
        return "limited"
    if status == 503:
        return "unavailable"
    return "refused" if status < 500 else "error"
