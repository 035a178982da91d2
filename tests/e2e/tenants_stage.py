"""A gateway whose tenants are held to something, before scripted servers; what they are answered,
and what the ledger says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tests.e2e.client import Client
from tests.e2e.fleet_stage import caller
from tests.e2e.gateway_process import START_S, GatewayProcess, eventually, free_port
from tests.e2e.tiers import OPERATOR_KEY, SECRET
from tests.gateway.remote.upstream import Received, Script, Upstream, chunk, in_turn, sse

TENANTS = {
    "acme": "limits: {concurrency: 100}",
    "single": "limits: {concurrency: 1, rpm: 1000}",
    "seldom": "limits: {rpm: 3}",
    "terse": "limits: {tpm: 100}",
    "poor": "limits: {budget_usd: {amount: 0.00003, per: day}}",
    "hasty": "slo: {ttft_ms: 0.001, on_overload: reject}",
}
"""By id: what each is held to. The budget is enough for one answer of `m`; a promise of a
microsecond cannot be kept while anybody else is served."""
PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS = 20, 5, 16
"""Of an answer as `tests.gateway.remote.upstream.whole` has it."""
PRICE = "price: {input: 1.00, cached_input: 0.50, output: 2.00}"


def key_of(tenant: str) -> str:
    """The key of a tenant of the stage."""
    return f"sk-{tenant}-8Rk2VnQ5tY7wLm3"


class Servers:
    """Two scripted servers, of which a gateway has to take either."""

    def __init__(self, portal: BlockingPortal, scope: ExitStack) -> None:
        self._portal = portal
        self._all = [Upstream(), Upstream()]
        for server in self._all:
            scope.enter_context(portal.wrap_async_context_manager(server.serve()))

    @property
    def listed(self) -> str:
        """For a gateway's configuration."""
        return ", ".join(
            f'{{url: "{each.url}", engine: vllm, model: served}}' for each in self._all
        )

    @property
    def asked(self) -> int:
        """How many requests have come since the last `say`."""
        return sum(len(server.received) for server in self._all)

    def say(self, *scripts: Script) -> None:
        """Answer so from now on, whichever server is asked; the last also all later ones."""
        turns = in_turn(*scripts)
        for server in self._all:
            server.received.clear()
            server.scripts = [turns]


async def held(received: Received) -> None:
    """A stream that begins and goes on for as long as its client stays."""
    await received.begin_stream()
    await received.piece(sse(chunk("", role=True), chunk("once")))
    await received.gone()


@dataclass
class TenantsStage:
    """The gateway, and what it asks."""

    gateway: GatewayProcess
    servers: Servers

    @contextmanager
    def client(self, tenant: str) -> Iterator[Client]:
        """One tenant's way in."""
        with caller(self.gateway) as http:
            yield Client(http, key_of(tenant))

    def post(self, tenant: str, body: object, **headers: str) -> httpx.Response:
        """One chat call of a tenant."""
        with self.client(tenant) as client:
            return client.http.post(
                "/v1/chat/completions", json=body, headers=client.headers | headers
            )

    @contextmanager
    def holding(self, tenant: str, model: str = "m", **fields: object) -> Iterator[Iterator[str]]:
        """A stream of the tenant that has begun; its lines. Leaving the scope is leaving it."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with (
            self.client(tenant) as client,
            client.http.stream(
                "POST", "/v1/chat/completions", json=body | fields, headers=client.headers
            ) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            next(lines)
            yield lines

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Both servers generate for somebody."""
        self.servers.say(held)
        with self.holding("acme"), self.holding("acme"):
            assert self.servers.asked == 2
            yield

    def operator(self, method: str, path: str, body: object = None) -> httpx.Response:
        """One call of the operator's."""
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        with caller(self.gateway) as http:
            return http.request(method, f"/admin{path}", json=body, headers=headers)

    def rows(self, answer: httpx.Response, at_least: int = 1) -> list[dict[str, Any]]:
        """The ledger's rows of a request, as soon as there are so many."""
        return self.rows_of(answer.headers["x-request-id"], at_least)

    def rows_of(self, request_id: str, at_least: int = 1) -> list[dict[str, Any]]:
        """By its id."""
        found: list[dict[str, Any]] = []

        def written() -> bool:
            answer = self.operator("GET", "/ledger?format=jsonl")
            assert answer.status_code == 200, answer.text
            rows = [json.loads(line) for line in answer.text.splitlines()]
            found[:] = [row for row in rows if row["request_id"] == request_id]
            return len(found) >= at_least

        eventually(written, 5, lambda: f"{request_id}: {len(found)} rows", every_s=0.05)
        return found


@contextmanager
def tenants_stage(directory: Path, tiny: Path | None = None) -> Iterator[TenantsStage]:
    """Ready. `m` is at the servers, and has a price; `fallen` is nowhere, and falls back to `m`;
    `gone` is nowhere at all; `tiny`, if it is given, is run by the gateway, one request at a time.
    """
    with ExitStack() as scope:
        portal = scope.enter_context(start_blocking_portal())
        servers = Servers(portal, scope)
        nowhere = f'remote: [{{url: "http://127.0.0.1:{free_port()}/v1", shared_cache: accept}}]'
        tenants = "\n".join(
            f"  - {{id: {name}, keys: [{{env: KEY_{name.upper()}}}], {terms}}}"
            for name, terms in TENANTS.items()
        )
        own = f"""
  - {{name: tiny, path: "{tiny}", dtype: float32, max_context: 8192, max_running: 1, {PRICE},
     max_waiting: 1, replicas: {{threads: 1}}, cache: {{device: 64MiB, dram: 0, redis: false}}}}"""
        config = f"""
server: {{port: PORT, log_level: debug, log_format: json}}
models:
  - {{name: m, remote: [{servers.listed}], {PRICE}}}
  - {{name: fallen, {nowhere}, fallbacks: [m]}}
  - {{name: gone, {nowhere}}}{own if tiny else ""}
tenants:
{tenants}
routing: {{policy: predicted-ttft, recovery_s: 0}}
"""
        environ = {f"KEY_{name.upper()}": key_of(name) for name in TENANTS}
        environ |= {"FOREBAY_ADMIN_KEY": OPERATOR_KEY, "FOREBAY_SECRET": SECRET}
        gateway = scope.enter_context(GatewayProcess(directory, config, environ))
        eventually(lambda: _not_serving(gateway) == {"fallen", "gone"}, START_S)
        yield TenantsStage(gateway, servers)


def _not_serving(gateway: GatewayProcess) -> set[str] | None:
    """Models that nobody serves; None before the gateway is ready."""
    assert gateway.process.poll() is None, gateway.output
    if gateway.status_of("/health/ready") != 200:
        return None
    with caller(gateway) as http:
        return set(http.get("/health/ready").json()["not_serving"])
