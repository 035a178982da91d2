"""GET /admin/ledger: every row, as a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing

from gateway.admin.auth import require_operator
from gateway.admin.bodies import queried_tenant
from gateway.errors import bad_request
from gateway.http_call import HttpCall
from gateway.http_disconnect import ends_with_client
from gateway.ledger.book import LedgerBook
from gateway.ledger.export import FORMATS
from gateway.ledger.period import read_period
from gateway.ledger.table import LedgerUnavailable
from gateway.ledger.usage_answer import ledger_unavailable, opened
from gateway.reload import RuntimeConfig
from gateway.wire.unknown_names import refuse_unknown_parameters


class LedgerAdmin:
    """Needs the operator's key."""

    def __init__(self, runtime: RuntimeConfig, book: Callable[[], LedgerBook | None]) -> None:
        """`book` is the ledger, None until it is open."""
        self._runtime = runtime
        self._book = book

    async def export(self, call: HttpCall) -> None:
        """`format=csv|jsonl`, `start`, `end` (the last 24 hours if left out), `tenant`: rows by the
        time that their requests were over. They are read as fast as the client takes them, and
        never all in memory. Where the database is lost in the middle, the connection is cut."""
        require_operator(call, self._runtime.current)
        query = call.query()
        refuse_unknown_parameters(query, ("format", "start", "end", "tenant"))
        wanted = query.get("format", "csv")
        if wanted not in FORMATS:
            raise bad_request(f"format must be one of {', '.join(FORMATS)}.", param="format")
        content_type, head, lines = FORMATS[wanted]
        period = read_period(query, time.time(), longest_s=None)
        tenant = queried_tenant(query)
        book = opened(self._book())
        headers = [
            (b"content-type", content_type),
            (b"content-disposition", b'attachment; filename="ledger.%b"' % wanted.encode()),
            (b"cache-control", b"no-store"),
        ]
        if call.method == "HEAD":
            await call.start(200, headers)
            await call.send(b"", more=False)
            return
        async with (
            ends_with_client(call),
            aclosing(book.pages(period.start_s, period.end_s, tenant)) as pages,
        ):
            body = head()
            try:
                async for page in pages:
                    if not call.response_started:
                        await call.start(200, headers)
                    await call.send(body + lines(page.rows), more=page.last is not None)
                    body = b""
            except LedgerUnavailable:
                if call.response_started:
                    raise
                raise ledger_unavailable() from None
