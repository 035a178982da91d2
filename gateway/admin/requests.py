"""`/admin/requests/{id}` and `/admin/route/explain`: why a request went, or would go, where."""

from __future__ import annotations

from typing import Any

from gateway.admin.auth import require_operator
from gateway.admin.remembered import remembered
from gateway.admin.route_answers import receipt_answer
from gateway.errors import bad_request
from gateway.http_body import read_body
from gateway.http_call import HttpCall
from gateway.journey import Journey
from gateway.recent_requests import RecentRequest, RecentRequests
from gateway.reload import RuntimeConfig, Snapshot
from gateway.wire.json_body import parse_object


class RequestAdmin:
    """Handlers. Each needs the operator's key."""

    def __init__(self, runtime: RuntimeConfig, recent: RecentRequests, journey: Journey) -> None:
        self._runtime = runtime
        self._recent = recent
        self._journey = journey

    async def show(self, call: HttpCall, request_id: str) -> None:
        """Every decision about the requests of this id; a 404 if none is remembered."""
        self._admitted(call)
        found = remembered(self._recent, request_id)
        await call.answer_json(
            {"request_id": request_id, "requests": [_request(recent) for recent in found]}
        )

    async def explain(self, call: HttpCall) -> None:
        """A dry run: the body is a chat's or a completion's, with `tenant`, whose request it would
        be. Nothing is sent, counted or remembered."""
        snapshot = self._admitted(call)
        values = parse_object(await read_body(call, snapshot.settings.server.body_limit))
        name = values.pop("tenant", None)
        tenant = snapshot.key_ring.tenant(name) if isinstance(name, str) else None
        if tenant is None:
            raise bad_request("tenant must be the id of a configured tenant.", param="tenant")
        receipts = await self._journey.explain(call, values, tenant, snapshot)
        await call.answer_json({"decisions": [receipt_answer(receipt) for receipt in receipts]})

    def _admitted(self, call: HttpCall) -> Snapshot:
        snapshot = self._runtime.current
        require_operator(call, snapshot)
        return snapshot


def _request(recent: RecentRequest) -> dict[str, Any]:
    return {
        "tenant": recent.tenant,
        "model": recent.model,
        "replica": recent.replica,
        "endpoint": recent.endpoint,
        "ended": int(recent.ended),
        "choices": [
            {
                "choice": choice.choice,
                "prompt": choice.prompt,
                "decisions": [receipt_answer(receipt) for receipt in choice.receipts],
            }
            for choice in recent.choices
        ],
        "decisions": [receipt_answer(receipt) for receipt in recent.receipts],
    }
