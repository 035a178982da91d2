"""`service_tier`: which class a request runs in, and what its answer says of that."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.wire.chat_reply import ChatReply
from gateway.wire.completion_reply import CompletionReply
from gateway.wire.reply import ReplyHead
from policies.service_class import ServiceClass
from tests.gateway.fakes import ByteTokenizer
from tests.gateway.stage import CHAT, COMPLETIONS, K1, Stage, chat, chunks, error_of, prompt, tenant

BODIES = [(CHAT, chat), (COMPLETIONS, prompt)]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(("tier", "served"), [("flex", "flex"), ("auto", "default")])
async def test_who_asks_is_told_in_every_part_of_the_answer(
    path: str, body: Any, tier: str, served: str
) -> None:
    stage = Stage()
    whole = (await stage.post(path, body(service_tier=tier))).json()
    assert whole["service_tier"] == served
    options = {"include_usage": True}
    for chunk in chunks(await stage.stream(path, body(service_tier=tier, stream_options=options))):
        assert chunk["service_tier"] == served


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_who_does_not_ask_is_told_nothing(path: str, body: Any) -> None:
    stage = Stage()
    assert "service_tier" not in (await stage.post(path, body(service_tier=None))).json()
    assert all("service_tier" not in chunk for chunk in chunks(await stage.stream(path, body())))


@pytest.mark.parametrize("own", list(ServiceClass))
async def test_a_tier_lifts_nobody_above_its_tenants_class(own: ServiceClass) -> None:
    stage = Stage(tenants={K1: tenant("acme", service_class=own)})
    for tier, wanted in (("priority", 0), ("default", 1), ("flex", 2), (None, own.priority)):
        answer = await stage.post(CHAT, chat(service_tier=tier))
        assert answer.status_code == 200
        assert stage.replica.requests[-1].priority == max(wanted, own.priority)


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("tier", ["scale", "", 1, False, ["flex"], {}])
async def test_a_tier_that_is_none_is_refused(path: str, body: Any, tier: object) -> None:
    response = await Stage().post(path, body(service_tier=tier))
    assert response.status_code == 400
    assert error_of(response)["param"] == "service_tier"


@pytest.mark.parametrize("reply", [ChatReply, CompletionReply])
def test_without_a_tier_no_byte_of_a_chunk_changes(
    reply: type[ChatReply] | type[CompletionReply],
) -> None:
    head = ReplyHead("id", 1, "m", "fp")
    made = reply(head, ByteTokenizer(), include_usage=False, wants_logprobs=False)
    assert b"service_tier" not in made.final(0, "stop")
    assert list(head.as_wire("k")) == ["id", "object", "created", "model", "system_fingerprint"]
