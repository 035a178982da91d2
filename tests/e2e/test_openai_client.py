"""The official client against the real thing."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.e2e.client import ACME_KEY
from tests.e2e.gateway_process import GatewayProcess

ASK = [{"role": "user", "content": "Write one sentence about the sea."}]


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(api_key=ACME_KEY, base_url=gateway.url + "/v1", max_retries=0) as client:
        yield client


def test_chat_whole_and_streamed_are_the_same_text(client: OpenAI) -> None:
    create = {"model": "m", "messages": ASK, "temperature": 0, "max_tokens": 64, "stop": ["."]}
    whole = client.chat.completions.create(**create)
    chunks = list(
        client.chat.completions.create(
            **create, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with client.chat.completions.stream(**create) as stream:
        assert stream.get_final_completion().choices[0].message.content == text


def test_choices_stop_and_logprobs(client: OpenAI) -> None:
    several = client.chat.completions.create(
        model="m", messages=ASK, n=2, seed=3, temperature=1, max_tokens=12, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    assert [choice.index for choice in several.choices] == [0, 1]
    first, second = (choice.message.content for choice in several.choices)
    assert first != second
    for choice in several.choices:
        entries = choice.logprobs.content
        joined = b"".join(bytes(entry.bytes) for entry in entries)
        assert joined.decode() == choice.message.content
        for entry in entries:
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    whole = client.completions.create(model="m", prompt="1, 2, 3, 4,", temperature=0, max_tokens=16)
    stopped = client.completions.create(
        model="m", prompt="1, 2, 3, 4,", temperature=0, max_tokens=16, stop=["7"]
    )
    text = whole.choices[0].text
    assert stopped.choices[0].text == text[: text.index("7")]
    assert stopped.choices[0].finish_reason == "stop"


def test_a_seed_gives_the_same_text(client: OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="m", messages=ASK, n=2, seed=seed, temperature=1.2, max_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    assert texts(5) == texts(5) != texts(6)


def test_refusals_are_the_clients_own_exceptions(gateway: GatewayProcess, client: OpenAI) -> None:
    with (
        OpenAI(api_key="sk-wrong-0123456789", base_url=gateway.url + "/v1", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()
    assert [model.id for model in client.models.list()] == ["m", "tiny"]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=ASK)
    assert missing.value.code == "model_not_found"
    too_long = [{"role": "user", "content": "x " * 3000}]
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="m", messages=too_long)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="m", messages=ASK, temperature=3)
    assert wrong.value.param == "temperature"
