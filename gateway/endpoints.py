"""What the two generating endpoints differ in; the journey treats them alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from gateway.prompts import Prompt, encode_conversation, encode_prompts
from gateway.served_model import ServedModel
from gateway.wire.chat import ChatRequest, chat_of
from gateway.wire.chat_reply import ChatReply
from gateway.wire.completion_reply import CompletionReply
from gateway.wire.completions import completion_of
from gateway.wire.generation import Generation


@dataclass(frozen=True, slots=True)
class Task:
    """A validated body. `encode` turns its text into prompts, `reply` writes its answer.

    `logprobs` is how many alternatives to show, None for none at all; `echo` puts the prompt in
    front of the answer; `prompt_field` is the body's field that the prompt comes from. `chat` is
    what a chat's body said.
    """

    generation: Generation
    prompt_field: str
    logprobs: int | None
    echo: bool
    encode: Callable[[ServedModel], Awaitable[list[Prompt]]]
    reply: type[ChatReply] | type[CompletionReply]
    chat: ChatRequest | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`name` is its label in metrics and logs, `id_prefix` starts its answers' ids, `path` is what
    follows an OpenAI server's base URL."""

    name: str
    id_prefix: str
    path: str
    read: Callable[[Mapping[str, object]], Task]


def chat_task(request: ChatRequest) -> Task:
    """What a chat body asks for."""

    async def encode(model: ServedModel) -> list[Prompt]:
        return [await encode_conversation(request.conversation, model)]

    return Task(
        request.generation, "messages", request.logprobs, False, encode, ChatReply, chat=request
    )


def _read_chat(values: Mapping[str, object]) -> Task:
    return chat_task(chat_of(values))


def _read_completion(values: Mapping[str, object]) -> Task:
    request = completion_of(values)

    async def encode(model: ServedModel) -> list[Prompt]:
        return await encode_prompts(request, model)

    return Task(
        request.generation, "prompt", request.logprobs, request.echo, encode, CompletionReply
    )


CHAT = Endpoint("chat", "chatcmpl-", "/chat/completions", _read_chat)
COMPLETIONS = Endpoint("completions", "cmpl-", "/completions", _read_completion)
