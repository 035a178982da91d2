"""Health, metrics, version: what operators and their tools ask."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

from gateway.admin.auth import require_operator
from gateway.errors import ApiError
from gateway.http_call import HttpCall
from gateway.lifecycle import Lifecycle
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.models import Models
from gateway.reload import RuntimeConfig
from gateway.version import __version__


class StatusPages:
    """None of these needs a tenant's key."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        models: Models,
        metrics: Metrics,
        lifecycle: Lifecycle,
    ) -> None:
        self._runtime = runtime
        self._models = models
        self._metrics = metrics
        self._lifecycle = lifecycle

    async def live(self, call: HttpCall) -> None:
        """200 as long as the event loop turns, whatever the load."""
        await call.answer_json({"status": "live"})

    async def ready(self, call: HttpCall) -> None:
        """200 if a request sent now would be taken, else 503 with the reason. One model that cannot
        serve is no reason to send the others' requests elsewhere: it is named."""
        down = [name for name, model in self._models.items() if not model.router.serves]
        reason = self._unready_reason(down)
        if reason is None:
            await call.answer_json({"status": "ready", "not_serving": down})
        else:
            await call.answer_json(
                {"status": "unready", "reason": reason},
                status=503,
                headers=[(b"retry-after", b"5")],
            )

    async def metrics(self, call: HttpCall) -> None:
        """Prometheus' text format, for whom `server.metrics` says."""
        self._require_metrics_reader(call)
        # a thousand tenants' histograms take long to print: not on the event loop
        page = await asyncio.to_thread(self._metrics.render)
        await call.answer(200, page, content_type=CONTENT_TYPE.encode())

    async def version(self, call: HttpCall) -> None:
        """Which forebay this is."""
        await call.answer_json({"version": __version__})

    def _unready_reason(self, down: list[str]) -> str | None:
        if self._lifecycle.draining:
            return "draining"
        if not self._lifecycle.ready:
            return "loading"
        if len(down) == len(self._models):
            return f"no replica of {', '.join(down)} serves"
        return None

    def _require_metrics_reader(self, call: HttpCall) -> None:
        snapshot = self._runtime.current
        readers = snapshot.settings.server.metrics
        if readers == "open" or (readers == "local" and _is_local(call)):
            return
        if readers == "local":
            raise ApiError(
                403, "Metrics are for this machine only.", type="permission_error", code="forbidden"
            )
        require_operator(call, snapshot)


def _is_local(call: HttpCall) -> bool:
    """From this machine and for itself: a proxy on this machine speaks for others."""
    peer = call.peer()
    try:
        return peer is not None and ip_address(peer).is_loopback and not call.was_forwarded()
    except ValueError:
        return False
