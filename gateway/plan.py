"""What a validated request asks of the engine: one engine request per prompt and choice."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from cache.block import Retention
from cache.prompt_links import prompt_links, token_bytes_of
from engine.request import EngineRequest, SharedPrefix
from engine.sampling_params import SamplingParams
from gateway.cache_scope import CacheTerms
from gateway.choice import Choice
from gateway.dispatch.prefix import UNKNOWN, Prefix
from gateway.endpoints import Task
from gateway.errors import bad_request
from gateway.prompts import Prompt, context_exceeded
from gateway.sampling import choice_params
from gateway.served_model import ServedModel
from gateway.shared_prefixes import PrefixIndex
from gateway.terms import Terms
from gateway.text_choice import EchoedPrompt, TextChoice


def plan_choices(
    task: Task,
    prompts: list[Prompt],
    model: ServedModel,
    cache: CacheTerms,
    shared: PrefixIndex | None,
    terms: Terms,
) -> list[Choice]:
    """In OpenAI's order: the choices of the first prompt, then those of the second.

    `cache` says what the prompts may share with whom, `shared` knows what everybody may.
    Raises a 400 ApiError for a prompt that does not fit, for token ids that do not exist, and for
    more choices than could ever be taken at once: waiting would not help them.
    """
    generation = task.generation
    wanted = len(prompts) * generation.n
    if model.max_sequences is not None and wanted > model.max_sequences:
        raise bad_request(
            f"{len(prompts)} prompts with {generation.n} choices each are {wanted} sequences; "
            f"this model takes {model.max_sequences} at once.",
            param="n" if generation.n > 1 else task.prompt_field,
        )
    # scoring a prompt takes one step of the engine, whose own token is not shown
    scores_only = generation.max_tokens == 0
    scores_prompt = task.echo and task.logprobs is not None
    run_id = secrets.token_hex(12)
    choices: list[Choice] = []
    for prompt_index, prompt in enumerate(prompts):
        shared_prefix = None
        if shared is not None and cache.chain_root is not None:
            shared_prefix = shared.find(prompt.token_ids)
        prefix = UNKNOWN
        if cache.chain_root is not None and not scores_prompt:
            prefix = prompt_prefix(cache.chain_root, prompt.token_ids, shared_prefix)
        params = choice_params(
            generation.sampling,
            model,
            max_tokens=fit_context(prompt, generation.max_tokens, model, task.prompt_field),
            choices=range(generation.n),
            logprobs=None if scores_only else task.logprobs,
            prompt_logprobs=task.logprobs if scores_prompt else None,
        )
        for own in params:
            index = len(choices)
            request = EngineRequest(
                request_id=f"{run_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                params=own,
                priority=terms.priority,
                chain_root=cache.chain_root,
                read_cache=not scores_prompt,
                owner=cache.owner,
                shared=shared_prefix,
                retention=_retention(prompt, generation.keep_prompt_s),
                flow=terms.flow,
                weight=terms.weight,
                deadline_s=terms.deadline_s,
                tpot_s=terms.tpot_s,
            )
            text = _text(task, prompt, own, model, shows_generated=not scores_only)
            choices.append(Choice(index, prompt_index, request, text, prefix))
    return choices


def prompt_prefix(root: bytes, token_ids: Sequence[int], shared: SharedPrefix | None) -> Prefix:
    """How the directory knows the beginning of this prompt, whose chain begins at `root`."""
    token_bytes = token_bytes_of(token_ids)
    return Prefix(
        lambda block_tokens: prompt_links(
            root,
            token_bytes,
            block_tokens=block_tokens,
            shared_root=None if shared is None else shared.root,
            shared_tokens=0 if shared is None else shared.tokens,
        )
    )


def fit_context(
    prompt: Prompt, max_tokens: int | None, model: ServedModel, prompt_field: str
) -> int:
    """How many tokens may be generated: what was asked for, as far as the context has room.

    Raises a 400 ApiError if the prompt leaves no room for a single one.
    """
    prompt_tokens = len(prompt.token_ids)
    room = model.max_context - prompt_tokens
    if room < 1:
        raise context_exceeded(model, str(prompt_tokens), prompt_field)
    return room if max_tokens is None else max(1, min(max_tokens, room))


def _retention(prompt: Prompt, keep_prompt_s: int | None) -> tuple[Retention, ...]:
    """What breakpoints ask for, and for the whole prompt what the request does."""
    if keep_prompt_s is None:
        return prompt.retention
    whole = Retention(len(prompt.token_ids), keep_prompt_s, durable=True)
    return (*prompt.retention, whole)


def _text(
    task: Task, prompt: Prompt, params: SamplingParams, model: ServedModel, *, shows_generated: bool
) -> TextChoice:
    echoed = None
    if task.echo:
        echoed = EchoedPrompt(
            model.tokenizer,
            prompt.token_ids,
            prompt.text,
            wants_logprobs=params.prompt_logprobs is not None,
        )
    return TextChoice(
        model.tokenizer,
        stops=task.generation.stop,
        wants_logprobs=params.logprobs is not None,
        echoed=echoed,
        shows_generated=shows_generated,
    )
