"""However a request ends, it ends in the ledger, the metrics and one log line."""

from __future__ import annotations

import time
from time import monotonic
from types import TracebackType

import structlog

from cache.block import Tier
from gateway.errors import ApiError
from gateway.ledger.row import LedgerRow
from gateway.metrics import Metrics
from gateway.outcome import is_charged, outcome_of
from gateway.random_names import RandomNames
from gateway.recent_requests import RecentRequests
from gateway.request import Request
from gateway.slo.admission import OwnDeadline
from gateway.tenancy import Tenancy
from gateway.wire.usage import Usage
from policies.slo import LatestTimes

_row_ids = RandomNames(16)
_log = structlog.get_logger("forebay.request")


class settled:  # noqa: N801 - it is used as a statement
    """Run the request inside; on the way out, whatever happened, settle it once."""

    __slots__ = ("_metrics", "_recent", "_request", "_tenancy")

    def __init__(
        self,
        request: Request,
        metrics: Metrics,
        tenancy: Tenancy | None = None,
        recent: RecentRequests | None = None,
    ) -> None:
        """`tenancy` and `recent`, who remembers how requests met the cache, are None for what runs
        on no replica."""
        self._request = request
        self._metrics = metrics
        self._tenancy = tenancy
        self._recent = recent

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        request = self._request
        outcome, status = outcome_of(error)
        usage = request.usage()
        cost_nusd = None
        if self._tenancy is not None:
            shed = status == 503 and not isinstance(error, OwnDeadline)
            cost_nusd = _account(request, self._tenancy, outcome, status, usage, shed=shed)
            if isinstance(error, ApiError) and request.caller is not None:
                for name, value in _limits_now(request, self._tenancy):
                    error.headers.setdefault(name, value)
        _settle(request, self._metrics, outcome, status, usage, cost_nusd)
        if self._recent is not None:
            self._recent.note(request)


def _account(
    request: Request,
    tenancy: Tenancy,
    outcome: str,
    status: int | None,
    usage: Usage,
    *,
    shed: bool,
) -> int | None:
    """Write down what was let in, and judge it; the cost, None for what never was let in, because
    there was no room if it was `shed`."""
    tenant, model = request.tenant, request.model
    if tenant is None or model is None or request.caller is None:
        return None
    if request.reservation is None:
        if shed:
            tenancy.slo.shed(tenant, model.name, promised=request.promised)
        return None
    charged = is_charged(outcome, batch=bool(request.batch))
    cost_nusd = request.cost_nusd(usage) if charged else 0
    ttft_s, tpot_s, publish_s = request.ttft_s(), request.tpot_s(), request.publish_s()
    now_s, e2e_s = time.time(), monotonic() - request.call.started_s
    met = None
    if _tells_of_promises(request, outcome):
        met = tenancy.slo.note(
            tenant,
            model.name,
            promised=request.promised,
            # what failed has kept no promise, and its times are none of an answer's
            ttft_s=ttft_s if charged else None,
            tpot_s=tpot_s if charged else None,
            publish_s=publish_s if charged else None,
            at_most=_latest_times(request, outcome, e2e_s),
        )
    tenancy.ledger.note(
        LedgerRow(
            id=_row_ids.next(),
            request_id=request.call.request_id,
            started_s=now_s - e2e_s,
            finished_s=now_s,
            tenant=tenant.id,
            key=request.caller.key.id,
            model=model.name,
            endpoint=request.endpoint,
            service_class=request.terms.service_class,
            outcome=outcome,
            status=status,
            streamed=bool(request.streams()),
            prompt_tokens=usage.prompt_tokens,
            cached_device_tokens=usage.cached_by_tier[Tier.DEVICE],
            cached_dram_tokens=usage.cached_by_tier[Tier.DRAM],
            cached_redis_tokens=usage.cached_by_tier[Tier.REDIS],
            written_tokens=request.written_tokens(),
            output_tokens=usage.completion_tokens,
            cost_nusd=cost_nusd,
            e2e_s=e2e_s,
            queue_s=request.queue_s(),
            ttft_s=ttft_s,
            publish_s=publish_s,
            tpot_s=tpot_s,
            met_slo=met,
            replica=", ".join(_replicas(request)),
            batch=request.batch,
        )
    )
    return cost_nusd


def _latest_times(request: Request, outcome: str, e2e_s: float) -> LatestTimes | None:
    """Of a whole answer that was made elsewhere only the end is seen."""
    if outcome != "success" or request.first_token_s is not None or request.streams():
        return None
    return LatestTimes(e2e_s, request.tpot_of_s(e2e_s))


def _tells_of_promises(request: Request, outcome: str) -> bool:
    """Whether its end says how promises are kept: not its client's leaving, nor a mistake of its
    client's that a server elsewhere has found, nor its own deadline before its first token was due
    or could be seen."""
    if outcome != "expired":
        return outcome not in ("cancelled", "refused")
    if request.tenant is None or request.first_token_s is not None:
        return True
    if request.relayed is not None and not request.relayed.stream:
        return False
    ttft_s = request.tenant.slo.ttft_s
    return ttft_s is not None and monotonic() - request.call.started_s >= ttft_s


def _limits_now(request: Request, tenancy: Tenancy) -> list[tuple[str, str]]:
    """`x-ratelimit-*` for a refusal."""
    headers = request.limit_headers
    if not headers and request.caller is not None:
        headers = tenancy.limiter.headers(request.caller)
    return [(name.decode(), value.decode()) for name, value in headers]


def _settle(
    request: Request,
    metrics: Metrics,
    outcome: str,
    status: int | None,
    usage: Usage,
    cost_nusd: int | None,
) -> None:
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
        key=request.caller.key.id if request.caller else None,
        model=model,
        endpoint=request.endpoint,
        service_class=request.terms.service_class if request.caller else None,
        outcome=outcome,
        status=status,
        stream=request.streams(),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        cached_device_tokens=usage.cached_by_tier[Tier.DEVICE],
        cached_dram_tokens=usage.cached_by_tier[Tier.DRAM],
        cached_redis_tokens=usage.cached_by_tier[Tier.REDIS],
        generated_tokens=usage.completion_tokens,
        cost_nusd=cost_nusd,
        replica=", ".join(_replicas(request)) or None,
        predicted_ttft_ms=_ms(receipts[0].predicted_ttft_s) if receipts else None,
        ttft_ms=_ms(ttft_s),
        e2e_ms=_ms(e2e_s),
    )


def _replicas(request: Request) -> dict[str, None]:
    """Where it ran, each once, in order."""
    return dict.fromkeys(receipt.candidate.name for receipt in request.receipts())


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
