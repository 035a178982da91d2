"""The pages of the ledger, on an application of their own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import uvicorn
from starlette.types import ASGIApp

from gateway.admin.ledger import LedgerAdmin
from gateway.admin.usage import UsageAdmin
from gateway.app import Application, Routes
from gateway.ledger.book import LedgerBook
from gateway.lifecycle import Lifecycle
from gateway.metrics import Metrics
from gateway.reload import RuntimeConfig
from gateway.usage_api import UsageApi
from tests.gateway.database.both import Place
from tests.gateway.ledger.rows import Opened, opened
from tests.gateway.stage import SECRET, Stage, eventually


def pages(book: LedgerBook | None) -> ASGIApp:
    """`K1` is acme's key, `K2` beta's, `ADMIN` the operator's."""
    runtime = RuntimeConfig(Stage().snapshot())
    lifecycle = Lifecycle()
    lifecycle.loaded()
    usage = UsageApi(runtime, Metrics(["m"], ["acme", "beta"], SECRET), lambda: book)
    usage_admin, ledger_admin = (
        UsageAdmin(runtime, lambda: book),
        LedgerAdmin(runtime, lambda: book),
    )
    api = {
        "/v1/usage": {"GET": usage.show},
        "/admin/usage": {"GET": usage_admin.show},
        "/admin/ledger": {"GET": ledger_admin.export},
    }
    return Application(Routes(api, {}, lambda path: None, lifecycle), runtime)


@dataclass(frozen=True)
class Pages:
    """The application with an open ledger."""

    here: Opened
    app: ASGIApp

    def client(self, key: str) -> httpx.AsyncClient:
        return client(self.app, key)


def client(app: ASGIApp, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False),
        base_url="http://forebay",
        headers={"authorization": f"Bearer {key}"},
    )


@asynccontextmanager
async def opened_pages(place: Place) -> AsyncIterator[Pages]:
    async with opened(place) as here:
        yield Pages(here, pages(here.ledger))


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[int]:
    """The application behind a real server; the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve([listener]))
        await eventually(lambda: server.started)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task
