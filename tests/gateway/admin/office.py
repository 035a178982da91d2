"""A gateway with a database, as its operator sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from gateway.app import create_app
from gateway.registry.registry import Registry
from gateway.settings_fleet import RemoteSettings
from gateway.tenancy import Tenancy
from tests.gateway.database.both import Place
from tests.gateway.stage import ADMIN, CHAT, SECRET, Stage, chat


class Control:
    """A fleet that does as it is told."""

    async def add_local(self, model: str) -> str:
        return "fake/0"

    async def add_remote(self, model: str, remote: RemoteSettings) -> str:
        return "fake/0"

    async def retire(self, replica: str, timeout_s: float) -> None:
        pass


@dataclass
class Office:
    """`stage` has what is served; its tenant acme is the file's."""

    stage: Stage
    poll_s: float = 0.05

    def __post_init__(self) -> None:
        assert self.stage.app
        self.runtime = self.stage.runtime
        self.tenancy = Tenancy(self.runtime, self.stage.metrics)
        self.tenancy.registry = Registry(
            self.tenancy.database,
            self.runtime,
            on_tenants=self.stage.metrics.set_tenants,
            poll_s=self.poll_s,
        )
        self.database = self.tenancy.database
        self.registry = self.tenancy.registry
        self.trail = self.tenancy.trail
        self.app: Any = create_app(
            self.runtime,
            self.stage.models,
            self.stage.metrics,
            SECRET,
            self.stage.lifecycle,
            control=Control(),
            tenancy=self.tenancy,
        )

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = ADMIN,
        **options: Any,
    ) -> httpx.Response:
        """What the gateway answers."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://forebay", headers=headers
        ) as client:
            return await client.request(method, path, json=body, **options)

    async def chat(self, key: str, **fields: Any) -> httpx.Response:
        """A request of somebody with this key."""
        return await self.ask("POST", CHAT, chat(**fields), key=key)

    async def audit(self, **params: Any) -> list[dict[str, Any]]:
        """Rows of the trail, the newest first."""
        answer = await self.ask("GET", "/admin/audit", params=params)
        assert answer.status_code == 200, answer.text
        entries: list[dict[str, Any]] = answer.json()["entries"]
        return entries


@asynccontextmanager
async def open_office(place: Place, stage: Stage | None = None) -> AsyncIterator[Office]:
    """With its database open, and followed."""
    office = Office(stage or Stage())
    async with place.open() as database:
        office.database.use(database)
        async with office.registry.following():
            yield office
