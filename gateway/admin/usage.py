"""GET /admin/usage: what all tenants have used."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.admin.auth import require_operator
from gateway.admin.bodies import queried_tenant
from gateway.http_call import HttpCall
from gateway.ledger.book import LedgerBook
from gateway.ledger.usage_answer import USAGE_PARAMETERS, read_usage_query, usage_answer
from gateway.reload import RuntimeConfig
from gateway.wire.unknown_names import refuse_unknown_parameters


class UsageAdmin:
    """Needs the operator's key."""

    def __init__(self, runtime: RuntimeConfig, book: Callable[[], LedgerBook | None]) -> None:
        """`book` is the ledger, None until it is open."""
        self._runtime = runtime
        self._book = book

    async def show(self, call: HttpCall) -> None:
        """As GET /v1/usage, with tenants kept apart; `tenant` asks for one. Tenants that are gone
        are among them as long as the ledger remembers them."""
        require_operator(call, self._runtime.current)
        now_s = time.time()
        query = call.query()
        refuse_unknown_parameters(query, (*USAGE_PARAMETERS, "tenant"))
        wanted = read_usage_query(query, now_s, tenant=queried_tenant(query), by_tenant=True)
        await call.answer_json(await usage_answer(self._book(), wanted, now_s))
