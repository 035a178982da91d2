"""A gateway's part in batches around a scripted runner, and the API in front of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.app import create_app
from gateway.batches.line_answer import LineAnswer
from gateway.batches.opening import Batches, open_batches
from gateway.batches.runner import Tempo
from gateway.database.opening import DatabaseUnavailable, Transactions
from gateway.reload import RuntimeConfig, Snapshot
from gateway.settings_tenants import BatchSettings
from gateway.tenancy import Tenancy
from gateway.tenants import Caller, KeyRing, Tenant, hash_key
from tests.gateway.stage import K1, K2, SECRET, Stage, tenant
from tests.gateway.stage import eventually as eventually_within

PATH = "/v1/chat/completions"
QUICK = Tempo(poll_s=0.02, renew_s=0.02, pause_s=0.02)


def line(name: str, /, **fields: Any) -> dict[str, Any]:
    """A line for model m."""
    body = {"model": "m", "messages": [{"role": "user", "content": name}], "max_tokens": 8}
    return {
        "custom_id": name,
        "method": "POST",
        "url": PATH,
        "body": {**body, **fields.pop("body", {})},
        **fields,
    }


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def lines(count: int) -> bytes:
    return jsonl(*(line(f"line-{number}") for number in range(count)))


class Mortal:
    """A gateway's way to the database, which can be cut. `asked` counts transactions, `refused`
    those that came to nothing."""

    def __init__(self, database: Transactions) -> None:
        self.database = database
        self.away = False
        self.asked = self.refused = 0

    def begin(self, *, durable: bool = False) -> Any:
        return self._through(self.database.begin(durable=durable))

    def read(self) -> Any:
        return self._through(self.database.read())

    @asynccontextmanager
    async def _through(self, transaction: Any) -> AsyncIterator[AsyncConnection]:
        self.asked += 1
        try:
            self._check()
            async with transaction as connection:
                yield connection
                self._check()
        except DatabaseUnavailable:
            self.refused += 1
            raise

    def _check(self) -> None:
        if self.away:
            raise DatabaseUnavailable("away")


class FakeTime:
    """The database's clock, for tests that let hours pass."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s

    async def __call__(self, connection: AsyncConnection) -> float:
        return self.now_s


Script = Callable[[str], Awaitable[LineAnswer]]


def answered(text: str, status: int = 200, retry_after_s: float | None = None) -> LineAnswer:
    body: dict[str, object] = {"text": text} if status == 200 else {"error": {"code": text}}
    return LineAnswer(status, body, f"req-{text}", retry_after_s)


class FakeLines:
    """Answers lines by their custom ids as `script` says, and keeps count."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.began: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.callers: list[Caller] = []
        self.line_ids: dict[str, set[str]] = {}
        self.running = 0
        self.most_running = 0

    async def run(
        self,
        caller: Caller,
        endpoint_path: str,
        body: dict[str, Any],
        *,
        batch_id: str,
        line_id: str,
    ) -> LineAnswer:
        assert endpoint_path == PATH
        name = body["messages"][0]["content"]
        self.began[name] += 1
        self.callers.append(caller)
        self.line_ids.setdefault(name, set()).add(line_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            answer = await self.script(name) if self.script else answered(name)
        finally:
            self.running -= 1
        self.ended[name] += 1
        return answer


@dataclass
class BatchStage:
    """What a test changes before it opens a gateway; K1 is acme's key, K2 beta's."""

    database: Transactions
    tenants: dict[str, Tenant] = field(
        default_factory=lambda: {K1: tenant("acme"), K2: tenant("beta")}
    )
    batch: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    clock: Any = None

    def __post_init__(self) -> None:
        self.inner = Stage(tenants=self.tenants, server=self.server)
        assert self.inner.app is not None
        self.runtime: RuntimeConfig = self.inner.runtime
        self.tenancy = Tenancy(self.runtime, self.inner.metrics)
        self.late = self.tenancy.batches
        self.use(self.tenants)
        self.app = create_app(
            self.runtime,
            self.inner.models,
            self.inner.metrics,
            SECRET,
            self.inner.lifecycle,
            tenancy=self.tenancy,
        )

    def use(self, tenants: dict[str, Tenant]) -> None:
        """These keys, from now on."""
        settings = self.inner.snapshot().settings.model_copy(
            update={"batch": BatchSettings(**self.batch)}
        )
        ring = KeyRing((hash_key(key), owner) for key, owner in tenants.items())
        self.runtime.replace(replace(self.runtime.current, settings=settings, key_ring=ring))

    @property
    def snapshot(self) -> Snapshot:
        return self.runtime.current

    @asynccontextmanager
    async def gateway(
        self, runner: Any = None, database: Transactions | None = None
    ) -> AsyncIterator[Batches]:
        """One of the gateways, by its own way to the database; the API is the last one's."""
        options = {} if self.clock is None else {"clock": self.clock}
        async with open_batches(
            database or self.database,
            self.inner.models,
            self.runtime,
            runner or FakeLines(),
            tempo=QUICK,
            **options,
        ) as batches:
            self.late.use(batches)
            yield batches

    def client(self, key: str = K1) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://forebay", headers=headers)

    async def upload(self, content: bytes, key: str = K1, **fields: Any) -> str:
        """A file's id."""
        async with self.client(key) as client:
            response = await client.post(
                "/v1/files",
                files={"file": ("in.jsonl", content)},
                data={"purpose": "batch", **fields},
            )
        assert response.status_code == 200, response.text
        return response.json()["id"]

    async def begin(self, content: bytes, key: str = K1) -> str:
        """A batch's id."""
        input_file = await self.upload(content, key)
        body = {"input_file_id": input_file, "endpoint": PATH, "completion_window": "24h"}
        made = await self.post("/v1/batches", body, key)
        assert made["status"] == "validating", made
        return made["id"]

    async def post(self, path: str, body: Any = None, key: str = K1) -> Any:
        async with self.client(key) as client:
            return (await client.post(path, json=body)).json()

    async def get(self, path: str, key: str = K1) -> Any:
        async with self.client(key) as client:
            return (await client.get(path)).json()

    async def batch_of(self, batch_id: str, key: str = K1) -> Any:
        return await self.get(f"/v1/batches/{batch_id}", key)

    async def until(self, batch_id: str, *status: str | None, key: str = K1) -> Any:
        """The batch once it is in one of these; None: once there is no such batch."""
        async with asyncio.timeout(10):
            while True:
                batch = await self.batch_of(batch_id, key)
                if batch.get("status") in status:
                    return batch
                await asyncio.sleep(0.01)

    async def file_lines(self, file_id: str | None, key: str = K1) -> list[Any]:
        """What a file holds, parsed."""
        if file_id is None:
            return []
        async with self.client(key) as client:
            response = await client.get(f"/v1/files/{file_id}/content")
        assert response.status_code == 200, response.text
        return [json.loads(each) for each in response.text.splitlines()]

    async def results(self, batch: Any, key: str = K1) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is in the output and in the error file by custom id, each exactly once."""
        output = await self.file_lines(batch["output_file_id"], key)
        errors = await self.file_lines(batch["error_file_id"], key)
        names = [each["custom_id"] for each in [*output, *errors]]
        assert len(set(names)) == len(names), names
        counts = batch["request_counts"]
        assert counts["completed"] == len(output)
        assert counts["failed"] == len(errors)
        assert counts["completed"] + counts["failed"] == counts["total"]
        return (
            {each["custom_id"]: each for each in output},
            {each["custom_id"]: each for each in errors},
        )


async def eventually(condition: Callable[[], bool]) -> None:
    """As the stage's, with time for a database on a busy machine."""
    await eventually_within(condition, within_s=10.0)
