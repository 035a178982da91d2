"""Which requests can be run here, when a sequence ends, and what is said of it then."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.request import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from engine.sampling.sampler import Sampled
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class EndRules:
    """A model's bounds: its longest sequence in tokens, and the tokens that end one."""

    max_context: int
    eos_token_ids: frozenset[int]

    def problem_of(self, request: EngineRequest) -> str | None:
        """Why the request cannot be run; None if it can."""
        total = len(request.prompt_token_ids) + request.params.max_tokens
        if not request.prompt_token_ids:
            return "the prompt is empty"
        if request.params.max_tokens < 1:
            return "max_tokens must be at least 1"
        if not 0.0 < request.weight < math.inf:
            return "weight must be a positive number"
        given = request.generated_token_ids
        if len(given) >= request.params.max_tokens:
            return f"{len(given)} of max_tokens {request.params.max_tokens} are generated already"
        if given and self.ends(request.params, given[-1]):
            return "the tokens generated already end with a stop token"
        if total > self.max_context:
            return f"prompt and max_tokens need {total} of {self.max_context} tokens"
        return None

    def ends(self, params: SamplingParams, token: int) -> bool:
        """Whether this token is the last of a request with these parameters."""
        return token in params.stop_token_ids or (
            not params.ignore_eos and token in self.eos_token_ids
        )

    def advance(self, sequence: Sequence, sampled: Sampled) -> EngineOutput:
        """Append the token; `finish_reason` in what is said of it is set if it was the last."""
        params = sequence.request.params
        token = sampled.token_id
        sequence.append(token)
        first = sequence.generated == sequence.given + 1
        of_prompt: tuple[TokenLogprobs, ...] | None = None
        if params.prompt_logprobs is not None and sequence.generated == 1:
            of_prompt = tuple(sequence.prompt_logprobs)
        stopped = self.ends(params, token)
        reason = None
        if stopped:
            reason = FinishReason.STOP
        elif sequence.generated >= params.max_tokens:
            reason = FinishReason.LENGTH
        return EngineOutput(
            request_id=sequence.request.request_id,
            token_ids=(token,),
            logprobs=(sampled.logprobs,) if sampled.logprobs is not None else (),
            cached_tokens=sequence.cached_tokens,
            finish_reason=reason,
            stopped_by_token=stopped,
            prompt_logprobs=of_prompt,
            cache_use=sequence.cache_use if first else None,
        )


def last_words(
    request_id: str, reason: FinishReason, cached_tokens: int, error: str | None = None
) -> EngineOutput:
    """The end of a request that no token ended."""
    return EngineOutput(
        request_id=request_id,
        token_ids=(),
        logprobs=(),
        cached_tokens=cached_tokens,
        finish_reason=reason,
        error=error,
    )
