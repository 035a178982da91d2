"""A replica that is lost under a request: the client gets the whole answer, once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.dispatch.member import Condition, Health
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import ADMIN, CHAT, COMPLETIONS, Stage, chat, prompt

ANSWER = b"The quick brown fox jumps over the lazy dog"


def pair(**first: Any) -> tuple[Stage, ScriptedReplica, ScriptedReplica]:
    """A stage whose first replica is chosen first and breaks as told."""
    broken = ScriptedReplica(answer=ANSWER, name="m/0", **first)
    whole = ScriptedReplica(answer=ANSWER, name="m/1")
    stage = Stage(replica=broken, other_replicas=[whole])
    return stage, broken, whole


def prefer(stage: Stage, name: str) -> None:
    """Have the policy take this replica where it can."""

    class Prefer:
        def choose(self, request, candidates, random) -> int:
            names = [candidate.name for candidate in candidates]
            return names.index(name) if name in names else 0

    _ = stage.app
    stage.models["m"].router.use_policy("prefer", Prefer())


@pytest.mark.parametrize("dies_after", [0, 1, 7, len(ANSWER)])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_goes_on_at_another_replica(dies_after: int, path: str) -> None:
    stage, broken, whole = pair(dies_after=dies_after)
    prefer(stage, "m/0")
    body = chat() if path == CHAT else prompt(max_tokens=100)
    events = await stage.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    texts = [c["delta"].get("content", "") if path == CHAT else c["text"] for c in choices]
    assert "".join(texts).encode() == ANSWER
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert len({event["id"] for event in events[:-1]}) == 1
    [usage] = [event["usage"] for event in events[:-1] if event.get("usage")]
    assert usage["completion_tokens"] == len(ANSWER) + 1
    assert (broken.generated, whole.generated) == (dies_after, len(ANSWER) + 1 - dies_after)
    assert (broken.open, whole.open) == (0, 0)
    assert all(m.load.sequences == 0 for m in stage.models["m"].router.members)


async def test_a_whole_answer_and_several_choices_survive_too() -> None:
    stage, broken, _ = pair(dies_after=3)
    prefer(stage, "m/0")
    response = await stage.post(CHAT, chat(n=3, seed=5))
    assert response.status_code == 200
    texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert texts == [ANSWER.decode()] * 3
    assert response.json()["usage"]["completion_tokens"] == 3 * (len(ANSWER) + 1)
    assert response.headers["x-forebay-replica"] == "m/0, m/1"
    assert broken.aborted == []


async def test_logprobs_go_on_without_a_gap() -> None:
    stage, _, _ = pair(dies_after=5)
    prefer(stage, "m/0")
    response = await stage.post(CHAT, chat(logprobs=True, top_logprobs=1))
    entries = response.json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).encode() == ANSWER


async def test_every_decision_leaves_a_receipt() -> None:
    stage, _, _ = pair(dies_after=5)
    prefer(stage, "m/0")
    response = await stage.post(CHAT, chat())
    async with stage.client(ADMIN) as client:
        answer = await client.get(f"/admin/requests/{response.headers['x-request-id']}")
    [request] = answer.json()["requests"]
    first, second = request["choices"][0]["decisions"]
    assert (first["chosen"], second["chosen"]) == ("m/0", "m/1")
    assert first["outcome"]["lost"] == "The engine stopped before the answer was complete."
    assert first["outcome"]["cached_tokens"] == 0
    assert second["moved_from"] == "m/0"
    assert second["passed_by"] == {"m/0": "lost this request before"}
    assert second["prompt_tokens"] == first["prompt_tokens"] + 5
    metrics = stage.metrics.render().decode()
    assert 'forebay_failovers_total{model="m",when="mid_stream"} 1.0' in metrics
    assert 'forebay_route_decisions_total{model="m",policy="prefer",replica="m/1"} 1.0' in metrics


async def test_a_request_moves_only_so_often() -> None:
    stage, broken, whole = pair(dies_after=1)
    whole.dies_after = 2
    stage.routing = {"moves": 1, "recovery_s": 0}
    prefer(stage, "m/0")
    events = await stage.stream(CHAT, chat())
    assert events[-1]["error"]["code"] == "engine_unavailable"
    assert not any(e["choices"][0]["finish_reason"] for e in events[:-1])
    assert (len(broken.requests), len(whole.requests)) == (1, 1)


async def test_a_full_replica_is_no_reason_to_try_another() -> None:
    stage, _broken, whole = pair(full=True)
    prefer(stage, "m/0")
    response = await stage.post(CHAT, chat())
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert whole.requests == []


async def test_a_lone_replica_is_waited_for_while_it_comes_back() -> None:
    class Restarting(ScriptedReplica):
        back = False

        def health(self) -> Health:
            lost_one = self.requests and not self.back
            return Health(Condition.DOWN if lost_one else Condition.SERVING)

    lone = Restarting(answer=ANSWER, name="m/0", dies_after=4)
    stage = Stage(replica=lone)
    _ = stage.app
    router = stage.models["m"].router
    asking = asyncio.ensure_future(stage.post(CHAT, chat()))
    await asyncio.sleep(0.05)
    assert lone.requests
    assert not asking.done()
    lone.back, lone.dies_after = True, None
    router.changed()
    response = await asyncio.wait_for(asking, 5)
    assert response.json()["choices"][0]["message"]["content"].encode() == ANSWER
    assert len(lone.requests) == 2


async def test_a_client_that_leaves_during_a_move_leaves_nothing_behind() -> None:
    gate = asyncio.Event()
    stage, broken, whole = pair(dies_after=2)
    whole.gate = gate
    prefer(stage, "m/0")
    asking = asyncio.ensure_future(stage.post(CHAT, chat()))
    async with asyncio.timeout(5):
        while not whole.requests:  # noqa: ASYNC110 - there is nothing to be told by
            await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (broken.open, whole.open) == (0, 0)
    assert all(m.load.own().waiting == 0 for m in stage.models["m"].router.members)


async def test_a_replica_that_keeps_losing_requests_is_left_alone_for_a_while() -> None:
    stage, broken, _ = pair(dies_after=0)
    prefer(stage, "m/0")
    for _ in range(5):
        assert (await stage.post(CHAT, chat())).status_code == 200
    assert len(broken.requests) == 3  # the breaker's patience
    async with stage.client(ADMIN) as client:
        replicas = (await client.get("/admin/replicas")).json()["replicas"]
    states = {r["replica"]: r["breaker"]["state"] for r in replicas if r["model"] == "m"}
    assert states == {"m/0": "open", "m/1": "closed"}


async def test_a_request_that_breaks_every_replica_is_not_taken_to_all_of_them() -> None:
    poisoned = [ScriptedReplica(name=f"m/{i}", dies_after=0) for i in range(4)]
    stage = Stage(replica=poisoned[0], other_replicas=poisoned[1:])
    response = await stage.post(CHAT, chat())
    assert (response.status_code, int(response.headers["retry-after"])) == (503, 5)
    assert sum(len(replica.requests) for replica in poisoned) == 2
