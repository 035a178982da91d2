"""From validated bodies to token ids, off the event loop where the text is long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from cache.block import Retention
from engine.errors import TemplateError
from gateway.breakpoints import kept_prefixes
from gateway.errors import ApiError, bad_request
from gateway.served_model import ServedModel
from gateway.wire.completions import CompletionRequest
from gateway.wire.json_body import field_path
from gateway.wire.messages import Conversation

_LONG_CHARACTERS = 8 << 10
"""Where tokenizing a request's text begins to cost more than handing it to a thread."""

_tokenizing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="forebay-tokenize")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text where the client gave text.

    `messages` is how many messages of a chat come before the opening of the answer, `retention`
    says which beginnings of the prompt its client wants kept.
    """

    token_ids: list[int]
    text: str | None
    messages: int | None = None
    retention: tuple[Retention, ...] = ()


async def encode_conversation(
    conversation: Conversation, model: ServedModel, *, add_generation_prompt: bool = True
) -> Prompt:
    """Render the chat template and tokenize; a 400 where the template cannot show a turn.

    The date that templates may print is today's in UTC.
    """
    template = model.chat_template
    if template is None:
        raise bad_request("This model has no chat template; use /v1/completions.", param="messages")
    if conversation.tool_call_path and not model.shows_tool_calls:
        raise bad_request(
            "This model's chat template has no place for tool calls.",
            param=conversation.tool_call_path,
        )
    if conversation.tool_result_path and not model.shows_tool_results:
        raise bad_request(
            "This model's chat template has no place for tool results.",
            param=conversation.tool_result_path,
        )

    def encode() -> Prompt:
        now = datetime.now(UTC)
        ids = template.encode(
            conversation.messages, now=now, add_generation_prompt=add_generation_prompt
        )
        # what cannot fit is refused later: no more of it need be rendered
        fits = len(ids) < model.max_context
        kept = kept_prefixes(ids, conversation, template, now) if fits else ()
        messages = len(conversation.messages) if add_generation_prompt else None
        return Prompt(ids, None, messages=messages, retention=kept)

    # every breakpoint renders and tokenizes up to the whole text once more
    characters = conversation.characters() * (1 + len(conversation.breakpoints))
    try:
        if characters > _LONG_CHARACTERS:
            return await asyncio.get_running_loop().run_in_executor(_tokenizing, encode)
        return encode()
    except TemplateError as error:
        raise bad_request(
            f"The model's chat template refuses these messages: {error}", param="messages"
        ) from None


async def encode_prompts(request: CompletionRequest, model: ServedModel) -> list[Prompt]:
    """Tokenize every prompt of a completions body; ids are checked against the vocabulary.

    A text that cannot fit however it is tokenized is a 400 before it is.
    """
    several = len(request.prompts) > 1
    characters = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, str))
    prompts = []
    for i, prompt in enumerate(request.prompts):
        path = field_path("prompt", i) if several else "prompt"
        if isinstance(prompt, str):
            least = model.tokenizer.fewest_tokens(prompt)
            if least >= model.max_context:  # without spending seconds on an exact count
                raise context_exceeded(model, f"at least {least}", "prompt")
            ids = await encode_text(prompt, model, off_loop=characters > _LONG_CHARACTERS)
            encoded = Prompt(ids, prompt)
        else:
            if len(prompt) >= model.max_context:  # nor a look at each of millions of ids
                raise context_exceeded(model, str(len(prompt)), "prompt")
            require_known_tokens(prompt, model, path)
            encoded = Prompt(prompt, None)
        if not encoded.token_ids:
            raise bad_request(f"{path} must not be empty.", param=path)
        prompts.append(encoded)
    return prompts


async def encode_text(text: str, model: ServedModel, *, off_loop: bool = False) -> list[int]:
    """The ids of a bare prompt, with the token that the model wants at its start.

    `off_loop` is for a text that is short, but one of many.
    """
    if len(text) <= _LONG_CHARACTERS and not off_loop:
        return model.tokenizer.encode_prompt(text)
    return await asyncio.get_running_loop().run_in_executor(
        _tokenizing, model.tokenizer.encode_prompt, text
    )


def context_exceeded(model: ServedModel, prompt_tokens: str, prompt_field: str) -> ApiError:
    """The 400 for a prompt that leaves no room for a single token."""
    return bad_request(
        f"This model's context is {model.max_context} tokens, of which at least one is for "
        f"the answer, and the prompt has {prompt_tokens}.",
        param=prompt_field,
        code="context_length_exceeded",
    )


def require_known_tokens(ids: list[int] | frozenset[int], model: ServedModel, path: str) -> None:
    """A 400 unless every id is one of the model's tokens; ids are not negative."""
    if ids and max(ids) >= model.vocab_size:
        raise bad_request(
            f"{path} must hold token ids below {model.vocab_size}, this model's vocabulary.",
            param=path,
        )
