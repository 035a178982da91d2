"""A whole gateway around a scripted replica, in process or on a loopback port."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

import httpx
import uvicorn

from cache.directory import Directory
from gateway.app import create_app
from gateway.dispatch.member import Member
from gateway.dispatch.router import Router, RouterObserver
from gateway.http_limits import BoundedHttpProtocol
from gateway.lifecycle import Lifecycle
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.reload import RuntimeConfig, Snapshot
from gateway.routing_policies import load_policy
from gateway.served_model import ServedModel
from gateway.settings import ServerSettings, Settings
from gateway.sse import StreamTimes
from gateway.tenancy import Tenancy
from gateway.tenants import CacheScope, KeyRing, Tenant, TenantCache, hash_key
from policies.limits import Limits
from tests.gateway.fakes import ByteTokenizer, RoleTemplate, ScriptedReplica

K1, K2 = "key-one-0123456789", "key-two-0123456789"
SECRET = b"server secret"
ADMIN = "admin-key-0123456789"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(content: object = "hi", **fields: object) -> dict[str, Any]:
    """A chat body for model m."""
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def prompt(text: object = "hi", **fields: object) -> dict[str, Any]:
    """A completions body for model m."""
    return {"model": "m", "prompt": text, **fields}


def router_over(
    model: str, replicas: Sequence[ScriptedReplica], observer: RouterObserver
) -> Router[ScriptedReplica]:
    """A router that chooses by predicted time to first token, always by the same chance."""
    directory = Directory()
    name = "predicted-ttft"
    router: Router[ScriptedReplica] = Router(
        model, directory, load_policy(name), name, Random(0), observer
    )
    for replica in replicas:
        directory.join(replica.name)
        router.add(
            Member(
                replica,
                "in-process",
                max_running=16,
                capacity=None,
                block_tokens=16,
                clock=monotonic,
            ),
            tells_events=True,
        )
    return router


class Observer:
    """Tells the metrics, and remembers what was routed."""

    def __init__(self, metrics: Metrics) -> None:
        self.decided = metrics.dispatch.decided
        self.began = metrics.dispatch.began

    def routed(self, model: str, replica: str, links: Sequence[bytes]) -> None:
        pass


def tenant(
    name: str = "acme",
    cache_scope: CacheScope = "tenant",
    concurrency: int | None = None,
    **fields: Any,
) -> Tenant:
    fields.setdefault("limits", Limits(concurrency=concurrency))
    return Tenant(id=name, cache=TenantCache(scope=cache_scope), **fields)


@dataclass
class Stage:
    """What a test changes before it asks for the app; `m` is the model, K1 acme's key."""

    replica: ScriptedReplica = field(default_factory=ScriptedReplica)
    template: RoleTemplate | None = field(default_factory=RoleTemplate)
    max_context: int = 512
    tenants: dict[str, Tenant] = field(
        default_factory=lambda: {K1: tenant("acme"), K2: tenant("beta")}
    )
    server: dict[str, Any] = field(default_factory=dict)
    shared_prefixes: tuple[dict[str, Any], ...] = ()
    defaults: dict[str, float] = field(default_factory=dict)
    max_sequences: int | None = None
    other_replicas: list[ScriptedReplica] = field(default_factory=list)
    routing: dict[str, Any] = field(default_factory=dict)
    times: StreamTimes = field(default_factory=StreamTimes)
    keep_account: Callable[[Tenancy], None] = lambda tenancy: None
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = Metrics(["m", "org/other"], ["acme", "beta"], SECRET)
        self.lifecycle = Lifecycle()
        self.lifecycle.loaded()
        self.models = Models()
        self._app: Any = None

    def snapshot(self) -> Snapshot:
        settings = Settings(
            server=ServerSettings(**self.server),
            models=({"name": "m", "path": "bundled", **self.model},),
            tenants=({"id": "acme", "keys": ({"env": "X"},)},),
            shared_prefixes=self.shared_prefixes,
            routing=self.routing,
        )
        ring = KeyRing((hash_key(key), owner) for key, owner in self.tenants.items())
        admin = bytes.fromhex(hash_key(ADMIN).removeprefix("sha256:"))
        return Snapshot(settings, ring, admin)

    @property
    def app(self) -> Any:
        if self._app is None:
            for name in ("m", "org/other"):
                self.models.add(
                    ServedModel(
                        name=name,
                        tokenizer=ByteTokenizer(),
                        chat_template=self.template,
                        max_context=self.max_context,
                        router=router_over(
                            name, [self.replica, *self.other_replicas], Observer(self.metrics)
                        ),
                        fingerprint="0123456789abcdef" * 4,
                        created=1_700_000_000,
                        generation_defaults=self.defaults,
                        max_sequences=self.max_sequences,
                    )
                )
            self.runtime = RuntimeConfig(self.snapshot())
            self.tenancy = Tenancy(self.runtime, self.metrics)
            self.keep_account(self.tenancy)
            self._app = create_app(
                self.runtime,
                self.models,
                self.metrics,
                SECRET,
                self.lifecycle,
                stream_times=self.times,
                tenancy=self.tenancy,
            )
        return self._app

    def client(self, key: str | None = K1) -> httpx.AsyncClient:
        """A client that calls the app in process; use it as an async context manager."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://forebay", headers=headers)

    async def post(self, path: str, body: object, key: str | None = K1) -> httpx.Response:
        async with self.client(key) as client:
            return await client.post(path, json=body)

    async def stream(self, path: str, body: dict[str, Any], key: str | None = K1) -> list[Any]:
        """The events of a streamed answer: parsed JSON, or "[DONE]"."""
        response = await self.post(path, {**body, "stream": True}, key)
        assert response.status_code == 200, response.text
        return events(response.text)

    @asynccontextmanager
    async def served(self, **options: Any) -> AsyncIterator[int]:
        """The app behind a real server, the gateway's own unless `http` says otherwise; the
        port."""
        options.setdefault("http", BoundedHttpProtocol)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = uvicorn.Server(
            uvicorn.Config(
                self.app, log_config=None, access_log=False, lifespan="off", ws="none", **options
            )
        )
        task = asyncio.create_task(server._serve([listener]))
        await eventually(lambda: server.started)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task
            listener.close()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in self.metrics.render().decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(label in series for label in wanted):
                total += float(value)
        return total


def events(text: str) -> list[Any]:
    """The data of a stream's events; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chunks(stream: list[Any]) -> list[Any]:
    """The JSON events of a stream that ends with [DONE]."""
    assert stream[-1] == "[DONE]"
    assert "[DONE]" not in stream[:-1]
    return stream[:-1]


def joined(stream: list[Any], index: int = 0) -> str:
    """A choice's text from its deltas."""
    text = ""
    for chunk in stream:
        if chunk == "[DONE]":
            continue
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a refusal, after checking that it has OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return body["error"]


async def eventually(condition: Any, within_s: float = 2.0) -> None:
    """Wait until the condition holds; fail if it does not in time."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "did not come true in time"
        await asyncio.sleep(0.005)
