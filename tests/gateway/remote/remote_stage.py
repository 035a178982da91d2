"""Remote models around scripted servers, and a client that calls them in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

from cache.directory import Directory
from gateway.demand import Ask
from gateway.dispatch.member import Condition, Member
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import Router
from gateway.endpoints import CHAT, COMPLETIONS
from gateway.errors import ApiError
from gateway.http_body import read_body
from gateway.http_call import ClientDisconnectedError, HttpCall
from gateway.http_disconnect import ends_with_client
from gateway.reload import Snapshot
from gateway.remote.model import RemoteModel, make_remote_model
from gateway.remote.probes import ProbeTimes
from gateway.remote.relay import LetIn, relay
from gateway.remote.replica import RemoteReplica, RemoteTimes, open_remote_replica
from gateway.request import Request
from gateway.settings import Settings
from gateway.settings_fleet import RemoteSettings
from gateway.sse import StreamTimes
from gateway.tenants import KeyRing, Tenant
from gateway.wire.json_body import parse_object
from policies.routing_ttft import PredictedTtft
from tests.gateway.remote.upstream import Upstream
from tests.gateway.stage import eventually, tenant

SECRET = b"a server's secret"
KEY = "sk-upstream-0123456789"
FAST = RemoteTimes(
    first_s=0.5,
    between_s=0.25,
    whole_s=0.5,
    probes=ProbeTimes(every_s=0.2, slowest_s=0.4, timeout_s=0.2),
)
PATIENT = RemoteTimes()
ACME = tenant("acme")


class NobodyWatches:
    """An observer of decisions that remembers those that began."""

    def __init__(self) -> None:
        self.receipts: list[Receipt] = []

    def decided(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)

    def began(self, receipt: Receipt) -> None:
        pass

    def routed(self, model: str, replica: str, links: Any) -> None:
        pass


@dataclass
class Answer:
    """What the client got, as it comes in. `closed` when the answer is over."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytearray = field(default_factory=bytearray)
    arrivals: list[bytes] = field(default_factory=list)
    closed: bool = False

    @property
    def json(self) -> Any:
        return json.loads(bytes(self.raw))

    @property
    def text(self) -> str:
        return self.raw.decode()


@dataclass
class RemoteStage:
    """`m` at some scripted servers, where it is called `served`."""

    upstreams: list[Upstream]
    settings: dict[str, Any] = field(default_factory=lambda: {"engine": "vllm"})
    routing: dict[str, Any] = field(default_factory=lambda: {"moves": 3, "recovery_s": 1.0})
    times: RemoteTimes = FAST
    stream_times: StreamTimes = field(default_factory=StreamTimes)
    tokenizer: Any = None
    template: Any = None
    let_in: LetIn = field(default_factory=lambda: _let_in)
    changes: int = 0
    restarts: int = 0

    async def open(self, scope: AsyncExitStack) -> None:
        self.observer = NobodyWatches()
        self.directory = Directory()
        self.router: Router[RemoteReplica] = Router(
            "m", self.directory, PredictedTtft(), "predicted-ttft", Random(1), self.observer
        )
        self.replicas: list[RemoteReplica] = []
        for upstream in self.upstreams:
            await scope.enter_async_context(upstream.serve())
            await self.add(upstream, scope)
        self.model: RemoteModel = make_remote_model(
            "m", self.router, SECRET, 1, tokenizer=self.tokenizer, chat_template=self.template
        )
        snapshot_settings = Settings(
            models=({"name": "x", "path": "bundled"},),
            tenants=({"id": "acme", "keys": ({"env": "X"},)},),
            routing=self.routing,
        )
        self.snapshot = Snapshot(snapshot_settings, KeyRing(()))
        self.requests: list[Request] = []

    async def add(self, upstream: Upstream, scope: AsyncExitStack) -> RemoteReplica:
        settings = RemoteSettings(
            url=upstream.url, model="served", api_key_env="KEY", **self.settings
        )
        replica = await open_remote_replica(
            "m",
            settings,
            {"KEY": KEY},
            on_change=self._changed,
            on_load=lambda standing: member.load.set_foreign(standing),
            on_restart=self._restarted,
            times=self.times,
            random=Random(1),
        )
        scope.push_async_callback(replica.close)
        member = Member(
            replica, "remote", max_running=8, capacity=None, block_tokens=16, clock=monotonic
        )
        self.directory.join(replica.name, approximate_blocks=10_000)
        self.router.add(member, tells_events=False)
        self.replicas.append(replica)
        await replica.probed()
        return replica

    def _changed(self) -> None:
        self.changes += 1
        self.router.changed()

    def _restarted(self) -> None:
        self.restarts += 1

    @property
    def last(self) -> Request:
        return self.requests[-1]

    async def serving(self) -> None:
        """Wait until every replica is."""
        await eventually(
            lambda: all(r.health().condition is Condition.SERVING for r in self.replicas)
        )

    @asynccontextmanager
    async def call(
        self, body: dict[str, Any], *, endpoint: Any = CHAT, who: Tenant = ACME
    ) -> AsyncIterator[Call]:
        """A call under way; leaving the scope early is a client that goes."""
        call = Call(self, body, endpoint, who)
        try:
            yield call
        finally:
            call.leave()
            await call.task

    async def post(
        self, body: dict[str, Any], *, endpoint: Any = CHAT, who: Tenant = ACME
    ) -> Answer:
        call = Call(self, body, endpoint, who)
        await call.task
        return call.answer


class Call:
    """One call, driven through ASGI's two functions."""

    def __init__(
        self, stage: RemoteStage, body: dict[str, Any], endpoint: Any, who: Tenant
    ) -> None:
        self.answer = Answer()
        self._stage = stage
        self._raw = json.dumps(body).encode()
        self._endpoint = endpoint
        self._who = who
        self._sent = False
        self._left = asyncio.Event()
        self._reads = asyncio.Event()
        self._reads.set()
        self._arrived = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """The client closes its connection."""
        self._left.set()

    def stop_reading(self) -> None:
        """What is sent to the client waits from now on."""
        self._reads.clear()

    def read_on(self) -> None:
        """The client reads again."""
        self._reads.set()

    async def until(self, text: str) -> None:
        """Wait until this has come, or the answer is over."""
        while text not in self.answer.text and not self.answer.closed:
            self._arrived.clear()
            async with asyncio.timeout(3):
                await self._arrived.wait()

    async def _receive(self) -> Any:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._raw, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {n.decode(): v.decode() for n, v in message["headers"]}
        else:
            self.answer.raw += message["body"]
            self.answer.arrivals.append(message["body"])
            self.answer.closed = not message["more_body"]
        self._arrived.set()
        await self._reads.wait()

    async def _run(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "state": {"request_id": "req-1"},
        }
        call = HttpCall(scope, self._receive, self._send)
        request = Request(call, self._endpoint.name, self._stage.snapshot, tenant=self._who)
        self._stage.requests.append(request)
        try:
            values = parse_object(await read_body(call, 1 << 30))
            async with ends_with_client(call):
                await relay(
                    request,
                    self._endpoint,
                    values,
                    self._stage.model,
                    self._who,
                    SECRET,
                    self._stage.stream_times,
                    self._stage.let_in,
                )
        except ApiError as error:
            if not call.response_started:
                await call.answer_error(error)
        except ClientDisconnectedError:
            pass


async def _let_in(asks: Sequence[Ask]) -> Receipt | None:
    """Everybody."""
    assert all(ask.route.prompt_tokens > 0 for ask in asks)
    return None


@asynccontextmanager
async def staged(*upstreams: Upstream, **fields: Any) -> AsyncIterator[RemoteStage]:
    stage = RemoteStage(list(upstreams), **fields)
    async with AsyncExitStack() as scope:
        await stage.open(scope)
        yield stage


def chat(content: object = "hi", **fields: object) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


__all__ = ["CHAT", "COMPLETIONS"]
