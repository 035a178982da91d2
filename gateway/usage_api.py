"""GET /v1/usage: what a tenant has used, what it cost, and how its promises were kept."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.http_call import HttpCall
from gateway.http_disconnect import ends_with_client
from gateway.ledger.book import LedgerBook
from gateway.ledger.usage_answer import USAGE_PARAMETERS, read_usage_query, usage_answer
from gateway.metrics import Metrics
from gateway.places import FewAtOnce
from gateway.reload import RuntimeConfig
from gateway.request import Request
from gateway.settlement import settled
from gateway.wire.unknown_names import refuse_unknown_parameters

USAGE = "/v1/usage"
_PER_TENANT = 4
"""Questions at once: each may sort millions of rows, and others wait for their turn."""
_RETRY_S = 5
_ENDPOINT = "usage"


class UsageApi:
    """Any of a tenant's keys sees all of the tenant's."""

    def __init__(
        self, runtime: RuntimeConfig, metrics: Metrics, book: Callable[[], LedgerBook | None]
    ) -> None:
        """`book` is the ledger, None until it is open."""
        self._runtime = runtime
        self._metrics = metrics
        self._book = book
        self._questions = FewAtOnce(_PER_TENANT, of="questions", retry_after_s=_RETRY_S)

    async def show(self, call: HttpCall) -> None:
        """`start`, `end` (Unix seconds, RFC 3339 or a date; the last 24 hours if left out) and
        `group_by=model|key|service_class|hour|day`. The answer is that of
        `gateway.ledger.usage_answer`."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            tenant = request.authenticate()
            now_s = time.time()
            given = call.query()
            refuse_unknown_parameters(given, USAGE_PARAMETERS)
            query = read_usage_query(given, now_s, tenant=tenant.id, by_tenant=False)
            async with ends_with_client(call):
                with self._questions.place(tenant.id):
                    answer = await usage_answer(self._book(), query, now_s)
                await call.answer_json(answer)
