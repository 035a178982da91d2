"""What is remembered of the last requests, and for how long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from cache.report import BlockRun, CacheUse, Miss
from engine.request import EngineRequest
from gateway.recent_requests import RecentRequests
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import (
    ADMIN,
    CHAT,
    COMPLETIONS,
    K1,
    K2,
    Stage,
    chat,
    error_of,
    eventually,
    prompt,
)


@dataclass
class DivergedReplica(ScriptedReplica):
    """Says of every prompt that it diverged at a token."""

    at: int = 20

    def look_up(self, request: EngineRequest) -> CacheUse:
        miss = BlockRun(self.at // 16, 1, None, Miss.DIVERGED, self.at)
        return CacheUse(16, runs=(miss,))


async def explain(stage: Stage, request_id: str, key: str = ADMIN) -> Any:
    async with stage.client(key) as client:
        response = await client.get(f"/admin/requests/{request_id}/cache")
    assert response.status_code == 200, response.text
    return response.json()["requests"]


async def post(stage: Stage, path: str, body: Any, request_id: str, key: str = K1) -> Any:
    async with stage.client(key) as client:
        headers = {"x-request-id": request_id}
        response = await client.post(path, json=body, headers=headers)
    assert response.headers["x-request-id"] == request_id
    return response


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_remembered_once_with_each_choice(stream: bool) -> None:
    stage = Stage()
    long = "the same beginning of every prompt, "
    await post(stage, COMPLETIONS, prompt([long + "one", long + "two"], stream=stream, n=2), "a")
    await post(stage, COMPLETIONS, prompt(long + "one"), "b")
    [first], [second] = await explain(stage, "a"), await explain(stage, "b")
    assert (first["tenant"], first["model"], first["endpoint"]) == ("acme", "m", "completions")
    assert [(c["choice"], c["prompt"]) for c in first["choices"]] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    ]
    [choice] = second["choices"]
    assert choice["cached_tokens"]["device"] == 32
    assert choice["prompt_tokens"] == len(long + "one")


async def test_a_divergence_is_placed_in_its_message() -> None:
    stage = Stage(replica=DivergedReplica())
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is it?"},
    ]
    await post(stage, CHAT, chat(messages=messages), "a")
    [remembered] = await explain(stage, "a")
    [run] = remembered["choices"][0]["runs"]
    # <|start|>system:be brief<|end|> are 17 tokens
    assert (run["message"], run["message_token"]) == (1, 3)
    assert run["why"].endswith("at token 3 of messages[1]")
    await post(stage, COMPLETIONS, prompt("x" * 40), "b")
    [remembered] = await explain(stage, "b")
    [run] = remembered["choices"][0]["runs"]
    assert run["message"] is None
    assert run["why"].endswith("at token 20 of the prompt")


async def test_no_prompt_text_is_kept_or_shown() -> None:
    stage = Stage(replica=DivergedReplica())
    await post(stage, CHAT, chat("a very private question"), "a")
    assert "private" not in str(await explain(stage, "a"))


async def test_requests_of_one_id_are_all_there_the_latest_first() -> None:
    stage = Stage()
    await post(stage, COMPLETIONS, prompt("one"), "same", K1)
    await post(stage, COMPLETIONS, prompt("two"), "same", K2)
    assert [entry["tenant"] for entry in await explain(stage, "same")] == ["beta", "acme"]


async def test_what_never_reached_a_replica_is_not_remembered() -> None:
    stage = Stage()
    assert (await post(stage, COMPLETIONS, prompt("x" * 9000), "long")).status_code == 400
    assert (await post(stage, COMPLETIONS, prompt("hi"), "key", "wrong")).status_code == 401
    async with stage.client(ADMIN) as client:
        for request_id in ("long", "key", "never-sent"):
            response = await client.get(f"/admin/requests/{request_id}/cache")
            assert response.status_code == 404
            assert error_of(response)["code"] == "request_not_found"


async def test_one_that_ended_before_it_ran_says_so() -> None:
    stage = Stage(replica=ScriptedReplica(gate=asyncio.Event()))
    task = asyncio.create_task(post(stage, COMPLETIONS, prompt("hi"), "gone"))
    await eventually(lambda: stage.replica.requests)
    task.cancel()
    await asyncio.wait([task])
    [remembered] = await explain(stage, "gone")
    assert remembered["choices"][0]["ran"] is False
    assert remembered["choices"][0]["runs"] == []


@dataclass
class Call:
    request_id: str


@dataclass
class Named:
    id: str = "acme"


@dataclass
class Prompted:
    token_ids: list[int]
    messages: int | None = None


@dataclass
class Chosen:
    cache_use: CacheUse | None = None
    index: int = 0
    prompt_index: int = 0
    receipts: tuple[Any, ...] = (SimpleNamespace(candidate=SimpleNamespace(name="m/0")),)


@dataclass
class Finished:
    """As much of a request as the ring looks at."""

    relayed = None

    call: Call
    model: Any
    prompts: list[Prompted]
    choices: list[Chosen]
    tenant: Named = field(default_factory=Named)
    endpoint: str = "chat"

    def receipts(self) -> list[Any]:
        return [receipt for choice in self.choices for receipt in choice.receipts]


def finished(stage: Stage, request_id: str, tokens: int = 3, use: CacheUse | None = None) -> Any:
    assert stage.app
    prompted = Prompted([1] * tokens, messages=1)
    return Finished(Call(request_id), stage.models["m"], [prompted], [Chosen(use)])


def test_the_ring_is_bounded_whatever_ids_clients_choose() -> None:
    stage, recent = Stage(), RecentRequests(3)
    for i in (0, 1, 0, 2, 0, 3):
        recent.note(finished(stage, f"r{i}"))
    assert [len(recent.find(f"r{i}")) for i in range(4)] == [1, 0, 1, 1]
    for i in range(3):
        recent.note(finished(stage, f"s{i}"))
    assert [len(recent.find(f"{kind}{i}")) for kind in "rs" for i in range(3)] == [0, 0, 0, 1, 1, 1]


def test_noting_costs_microseconds() -> None:
    stage, recent = Stage(), RecentRequests()
    use = CacheUse(16, runs=(BlockRun(0, 10, None, Miss.DIVERGED, 100),))
    request = finished(stage, "r", tokens=2000, use=use)
    recent.note(request)
    took = []
    for _ in range(50):
        started = perf_counter()
        recent.note(request)
        took.append(perf_counter() - started)
    assert min(took) < 500e-6  # ten times what it takes on a quiet machine


async def test_many_receipts_push_out_earlier_requests() -> None:
    """One request of a hundred choices weighs as much as a hundred of one."""
    recent = RecentRequests(remembered=4)
    stage = Stage()
    _ = stage.app

    def note(request_id: str, choices: int) -> None:
        receipt = SimpleNamespace(candidate=SimpleNamespace(name="m/0"))
        each = SimpleNamespace(index=0, prompt_index=0, cache_use=None, receipts=[receipt])
        request: Any = SimpleNamespace(
            tenant=SimpleNamespace(id="acme"),
            model=stage.models["m"],
            relayed=None,
            receipts=lambda: [receipt] * choices,
            choices=[each] * choices,
            call=SimpleNamespace(request_id=request_id),
            endpoint="chat",
            prompts=[SimpleNamespace(token_ids=[1])],
        )
        recent.note(request)

    for request_id, choices in (("a", 1), ("b", 20), ("c", 11)):
        note(request_id, choices)
    assert [bool(recent.find(each)) for each in "abc"] == [True, True, True]
    note("d", 1)
    assert [bool(recent.find(each)) for each in "abcd"] == [False, True, True, True]
    note("e", 1000)  # the latest is remembered whatever it weighs
    assert [bool(recent.find(each)) for each in "abcde"] == [False] * 4 + [True]
    note("f", 1)
    assert [bool(recent.find(each)) for each in "ef"] == [False, True]
