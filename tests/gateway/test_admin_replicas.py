"""/admin/replicas and /admin/route/explain."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine.report import EngineStats, Peaks, StepReport, StepWork
from gateway.app import create_app
from gateway.settings_fleet import RemoteSettings
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import ADMIN, CHAT, SECRET, Stage, chat, prompt

REMOTE = {"url": "http://h:1/v1", "engine": "vllm"}


class Control:
    """Remembers what it was told to do."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.refusal: str | None = None

    async def add_local(self, model: str) -> str:
        return self._add("local", model)

    async def add_remote(self, model: str, remote: RemoteSettings) -> str:
        return self._add(remote.url, model)

    async def retire(self, replica: str, timeout_s: float) -> None:
        self.told.append((replica, timeout_s))

    def _add(self, what: str, model: str) -> str:
        if self.refusal:
            raise ValueError(self.refusal)
        self.told.append((what, model))
        return "m/0"


@pytest.fixture
def stage() -> Stage:
    return Stage(replica=ScriptedReplica(name="m/0"), other_replicas=[ScriptedReplica(name="m/1")])


@pytest.fixture
def control() -> Control:
    return Control()


async def ask(
    stage: Stage, control: Control, method: str, path: str, key: str = ADMIN, **options: Any
) -> httpx.Response:
    _ = stage.app
    app = create_app(
        stage.runtime, stage.models, stage.metrics, SECRET, stage.lifecycle, control=control
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://forebay") as client:
        return await client.request(method, path, headers=headers, **options)


async def test_all_replicas_are_shown_with_their_state(stage: Stage, control: Control) -> None:
    answer = (await ask(stage, control, "GET", "/admin/replicas")).json()
    mine = [each for each in answer["replicas"] if each["model"] == "m"]
    assert [each["replica"] for each in mine] == ["m/0", "m/1"]
    assert mine[0]["condition"] == "serving"
    assert mine[0]["load"] == {
        "pending_tokens": 0,
        "waiting": 0,
        "running": 0,
        "context_tokens": 0,
    }
    one = (await ask(stage, control, "GET", "/admin/replicas/m/1")).json()
    assert one == mine[1]


async def test_a_replica_says_what_use_it_makes_of_its_device(
    stage: Stage, control: Control
) -> None:
    stats = EngineStats(0, 1, 1, 0, 1, 2, 0, 1, True, 0.0)
    stage.metrics.utilization.watch("m/1", Peaks(1e9, 3e9))
    work = StepWork(flops=500_000_000, bytes=1_000_000_000, prefill=False)
    stage.metrics.observe_step("m/1", StepReport((), 1.0, 1, 1, stats, work=work))
    shown = (await ask(stage, control, "GET", "/admin/replicas")).json()["replicas"]
    used = {each["replica"]: each["utilization"] for each in shown if each["model"] == "m"}
    unknown = {"mfu": None, "mbu": None}
    assert used == {
        "m/0": {"prefill": unknown, "decode": unknown},
        "m/1": {"prefill": unknown, "decode": {"mfu": 0.5, "mbu": 0.3333}},
    }


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/replicas"),
        ("POST", "/admin/replicas"),
        ("DELETE", "/admin/replicas/m/0"),
        ("POST", "/admin/replicas/m/0/drain"),
        ("POST", "/admin/route/explain"),
        ("GET", "/admin/requests/some-id"),
    ],
)
async def test_all_of_it_is_the_operators(
    stage: Stage, control: Control, method: str, path: str
) -> None:
    response = await ask(stage, control, method, path, key="key-one-0123456789", json={})
    assert response.status_code == 401
    assert control.told == []


async def test_a_drained_replica_gets_nothing_until_it_is_resumed(
    stage: Stage, control: Control
) -> None:
    drained = await ask(stage, control, "POST", "/admin/replicas/m/0/drain")
    assert drained.json()["condition"] == "draining"
    for _ in range(4):
        assert (await stage.post(CHAT, chat())).headers["x-forebay-replica"] == "m/1"
    resumed = await ask(stage, control, "POST", "/admin/replicas/m/0/resume")
    assert resumed.json()["condition"] == "serving"
    await ask(stage, control, "POST", "/admin/replicas/m/1/drain")
    assert (await stage.post(CHAT, chat())).headers["x-forebay-replica"] == "m/0"


async def test_replicas_are_added_and_removed(stage: Stage, control: Control) -> None:
    added = await ask(stage, control, "POST", "/admin/replicas", json={"model": "m"})
    assert (added.status_code, added.json()["replica"]) == (201, "m/0")
    await ask(stage, control, "POST", "/admin/replicas", json={"model": "m", "remote": REMOTE})
    gone = await ask(stage, control, "DELETE", "/admin/replicas/m/1?drain_s=2.5")
    assert gone.json() == {"replica": "m/1", "removed": True}
    assert control.told == [("local", "m"), ("http://h:1/v1", "m"), ("m/1", 2.5)]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "model"),
        ({"model": "nope"}, 404, "model"),
        ({"model": "m", "replicas": 2}, 400, "replicas"),
        ({"model": "m", "remote": {"url": "ftp://h", "engine": "vllm"}}, 400, "remote.url"),
        ({"model": "m", "remote": {"url": "http://h", "engine": "what"}}, 400, "remote.engine"),
        ({"model": "m", "remote": []}, 400, "remote"),
    ],
)
async def test_what_cannot_be_added_names_its_field(
    stage: Stage, control: Control, body: dict[str, Any], status: int, param: str
) -> None:
    response = await ask(stage, control, "POST", "/admin/replicas", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert control.told == []


@pytest.mark.parametrize("variable", ["FOREBAY_SECRET", "FOREBAY_DATABASE__URL", "PGPASSWORD"])
async def test_no_server_is_sent_a_secret_of_the_gateways_own(
    stage: Stage, control: Control, variable: str
) -> None:
    """Also where the fleet was opened before a reload made it one."""
    body = {"model": "m", "remote": {**REMOTE, "api_key_env": variable}}
    response = await ask(stage, control, "POST", "/admin/replicas", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "replica_not_added")
    assert control.told == []


async def test_a_refusal_of_the_fleet_is_a_conflict(stage: Stage, control: Control) -> None:
    control.refusal = "this server is used already"
    response = await ask(stage, control, "POST", "/admin/replicas", json={"model": "m"})
    assert response.status_code == 409
    assert response.json()["error"]["message"] == "This server is used already."


async def test_an_unknown_replica_is_a_404(stage: Stage, control: Control) -> None:
    for method, path in (("GET", "m/9"), ("DELETE", "m/9"), ("POST", "m/9/drain")):
        response = await ask(stage, control, method, f"/admin/replicas/{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (
            404,
            "replica_not_found",
        )


@pytest.mark.parametrize("drain_s", ["-1", "x", "nan", "inf", "4000"])
async def test_a_drain_time_is_seconds(stage: Stage, control: Control, drain_s: str) -> None:
    response = await ask(stage, control, "DELETE", f"/admin/replicas/m/0?drain_s={drain_s}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "drain_s")
    assert control.told == []


async def test_explaining_a_route_sends_nothing(stage: Stage, control: Control) -> None:
    body = chat("x" * 200)
    await stage.post(CHAT, body)
    [served] = [replica for replica in (stage.replica, *stage.other_replicas) if replica.requests]
    answer = await ask(
        stage, control, "POST", "/admin/route/explain", json={**body, "tenant": "acme"}
    )
    [decision] = answer.json()["decisions"]
    assert decision["chosen"] == served.name  # where the prompt was just sent
    cached = {c["replica"]: sum(c["cached_tokens"].values()) for c in decision["candidates"]}
    assert cached[served.name] > 150
    assert decision["outcome"]["ttft_ms"] is None
    other = await ask(
        stage, control, "POST", "/admin/route/explain", json={**body, "tenant": "beta"}
    )
    [foreign] = other.json()["decisions"]
    assert all(not any(c["cached_tokens"].values()) for c in foreign["candidates"])
    assert len(served.requests) == 1


async def test_every_prompt_of_a_completion_has_its_own_decision(
    stage: Stage, control: Control
) -> None:
    body = {**prompt(["a", "bb"], n=2), "tenant": "acme"}
    answer = await ask(stage, control, "POST", "/admin/route/explain", json=body)
    assert [each["prompt_tokens"] for each in answer.json()["decisions"]] == [1, 2]


async def test_explaining_needs_a_tenant(stage: Stage, control: Control) -> None:
    response = await ask(stage, control, "POST", "/admin/route/explain", json=chat())
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tenant")
