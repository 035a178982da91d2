"""The official client against the application."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import K1, Stage


def client_of(stage: Stage, key: str = K1) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key=key, base_url="http://forebay/v1", http_client=stage.client(None), max_retries=0
    )


HI = [{"role": "user", "content": "hi"}]


async def test_chat_and_completions_streamed_and_not():
    async with client_of(Stage(ScriptedReplica(answers={1: b"two"}))) as client:
        whole = await client.chat.completions.create(model="m", messages=HI, n=2, seed=1)
        assert [c.message.content for c in whole.choices] == ["Hello, world", "two"]
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        stream = await client.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello, world"
        assert chunks[-1].usage.completion_tokens == 13
        scored = await client.chat.completions.create(
            model="m", messages=HI, logprobs=True, top_logprobs=1
        )
        assert scored.choices[0].logprobs.content[0].top_logprobs[0].token == "H"
        text = await client.completions.create(model="m", prompt="x", stop=["world"])
        assert text.choices[0].text == "Hello, "
        pieces = await client.completions.create(model="m", prompt="x", stream=True)
        assert "".join([c.choices[0].text async for c in pieces]) == "Hello, world"


async def test_models_are_listed():
    async with client_of(Stage()) as client:
        assert [model.id async for model in client.models.list()] == ["m", "org/other"]
        assert (await client.models.retrieve("org/other")).owned_by == "forebay"


async def test_refusals_are_the_clients_own_exceptions():
    stage = Stage(ScriptedReplica(dies_after=3), max_context=32, routing={"moves": 0})
    create = {"model": "m", "messages": HI}
    async with client_of(stage, "wrong-key-0123456789") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**create)
    async with client_of(stage) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=HI)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * 99}]
            )
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.InternalServerError) as lost:
            await client.chat.completions.create(**create)
        assert lost.value.status_code == 503
        stream = await client.chat.completions.create(**create, stream=True)
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]
