"""From what a request says about sampling to what the engine's sampler reads."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from engine.sampling_params import SamplingParams
from gateway.prompts import require_known_tokens
from gateway.served_model import ServedModel
from gateway.wire.generation import Sampling

_SEED_BITS = 63


def choice_params(
    sampling: Sampling,
    model: ServedModel,
    *,
    max_tokens: int,
    choices: Iterable[int],
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> list[SamplingParams]:
    """One set of parameters per choice index: same seed, separate random streams.

    What the request leaves out is the checkpoint's own default, then the API's. Raises a 400 for
    token ids outside the vocabulary.
    """
    require_known_tokens(frozenset(sampling.logit_bias), model, "logit_bias")
    require_known_tokens(sampling.stop_token_ids, model, "stop_token_ids")
    defaults = model.generation_defaults

    def pick(given: float | None, name: str, otherwise: float) -> float:
        return given if given is not None else defaults.get(name, otherwise)

    seed = sampling.seed if sampling.seed is not None else secrets.randbits(_SEED_BITS)
    return [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=pick(sampling.temperature, "temperature", 1.0),
            top_p=pick(sampling.top_p, "top_p", 1.0),
            top_k=max(0, int(pick(sampling.top_k, "top_k", 0))),
            min_p=pick(sampling.min_p, "min_p", 0.0),
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=pick(sampling.repetition_penalty, "repetition_penalty", 1.0),
            logit_bias=sampling.logit_bias,
            seed=seed,
            choice_index=choice,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
        )
        for choice in choices
    ]
