"""One sequence on its way through the engine."""

from __future__ import annotations

import numpy as np

from cache.block import NOBODY, BlockKey
from cache.hashing import CHAIN_BLOCK_TOKENS, extend_chain, leave_shared
from cache.promotion import Lookup
from cache.report import CacheUse
from engine.request import EngineRequest, TokenLogprobs
from engine.sampling.sampler import SamplingRow
from policies.fairness import TokenCounters
from policies.scheduling import Rank, due_s


class Sequence:
    """A request's tokens, how far they are computed, and the pages they lie in.

    Computed tokens chase known tokens: `known` counts prompt and generated tokens, `computed` those
    whose KV is in `pages`. `known - computed` is 1 while decoding and more while prefilling; there
    is no other mode. The step loop owns every field. To the policies it is a `policies.job.Job`,
    where the fields are explained that it has for them.

    The first `given` generated tokens came with the request: another engine chose them.
    """

    __slots__ = (
        "_keys",
        "_tokens",
        "arrived_s",
        "begun",
        "cache_use",
        "charged",
        "computed",
        "counters",
        "deadline_s",
        "due_s",
        "erased",
        "flow",
        "given",
        "known",
        "leaving",
        "lookup",
        "max_tokens",
        "paced_from",
        "paced_s",
        "pages",
        "prefill_end",
        "prepaid",
        "prompt_logprobs",
        "prompt_tokens",
        "published",
        "rank",
        "reach",
        "request",
        "row",
        "slot",
        "tag",
        "token_s",
        "turn",
        "uncached",
        "weight",
    )

    def __init__(self, request: EngineRequest, arrival: int, arrived_s: float = 0.0) -> None:
        """`arrival` numbers those who came; `arrived_s` is when (`time.monotonic`)."""
        prompt, given = request.prompt_token_ids, request.generated_token_ids
        self.request = request
        self.rank = Rank(request.priority, arrival)
        self.flow = request.flow
        self.weight = request.weight
        self.deadline_s = request.deadline_s
        self.max_tokens = request.params.max_tokens
        self.arrived_s = arrived_s
        self.due_s = due_s(arrived_s, request.deadline_s, arrived_s)
        self.prompt_tokens = len(prompt)
        self._tokens = np.zeros(len(prompt) + self.max_tokens, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self.given = len(given)
        self.known = len(prompt) + len(given)
        self._tokens[len(prompt) : self.known] = given
        self.prefill_end = self.known
        """What was known when it last began: up to there it computes what is not new."""
        self.computed = 0
        self.pages: list[int] = []
        self.published = 0
        self.slot: int | None = None
        self.lookup: Lookup | None = None
        self.cache_use: CacheUse | None = None
        self.leaving = False
        """Removed while its pages were being loaded."""
        self.erased = False
        """Its owner's KV was erased: what it computes is not for others."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.reach = 0
        """While it waits: so many of its first blocks need not be computed, as far as is known."""
        self.uncached = 0
        """While it waits: the tokens that it will compute before its next one."""
        self.begun = False
        """It has run, and was preempted."""
        self.counters: TokenCounters | None = None
        self.tag: float | None = None
        self.prepaid = 0.0
        self.charged = 0
        self.turn = 0.0
        self.paced_s: float | None = None
        self.paced_from = 0
        """When it first came to a token here, and how many were known before that."""
        self.token_s: float | None = None
        """When it last came to one; this and `paced_s` are kept for who has a `tpot_s`."""
        self.row = SamplingRow(request.params, prompt, given)
        self._keys: list[BlockKey] = []

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache when it first ran; 0 before that."""
        return self.cache_use.cached_tokens if self.cache_use is not None else 0

    @property
    def generated(self) -> int:
        """Tokens generated so far, those included that came with the request."""
        return self.known - self.prompt_tokens

    def token_ids(self, start: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """A view of the tokens at positions start:end."""
        return self._tokens[start:end]

    def append(self, token_id: int) -> None:
        """One more generated token."""
        self._tokens[self.known] = token_id
        self.known += 1
        self.row.append(token_id)

    def block_keys(self, block_tokens: int, tokens: int) -> list[BlockKey]:
        """Keys of the full blocks within the first `tokens` tokens; [] if the request opted out.

        Chained once and kept: the list only grows.
        """
        root = self.request.chain_root
        if root is None:
            return []
        full = tokens // block_tokens
        while len(self._keys) < full:
            self._keys.append(self._next_key(root, block_tokens))
        return self._keys[:full]

    def parent_link(self, block_tokens: int) -> bytes | None:
        """The parent of the block that the first token not yet computed lies in, which need not be
        full; None if the request opted out."""
        root = self.request.chain_root
        if root is None:
            return None
        before = self.block_keys(block_tokens, self.computed)
        return self._parent(
            before[-1].link if before else None, len(before) * block_tokens, block_tokens, root
        )

    def _next_key(self, root: bytes, block_tokens: int) -> BlockKey:
        start = len(self._keys) * block_tokens
        before = self._keys[-1].link if self._keys else None
        parent = self._parent(before, start, block_tokens, root)
        token_bytes = self._tokens[start : start + block_tokens].astype("<u4", copy=False).tobytes()
        link = parent
        for offset in range(0, len(token_bytes), 4 * CHAIN_BLOCK_TOKENS):
            link = extend_chain(link, token_bytes[offset : offset + 4 * CHAIN_BLOCK_TOKENS])
        owner = self.request.owner if self._is_own(start + block_tokens) else NOBODY
        return BlockKey(link, parent, token_bytes, start, owner)

    def _parent(self, before: bytes | None, start: int, block_tokens: int, root: bytes) -> bytes:
        """A block that lies wholly in the shared prefix is everybody's; the first one behind it
        continues under the request's own root."""
        shared = self.request.shared
        own = self._is_own(start + block_tokens)
        if before is None:
            return shared.root if shared is not None and not own else root
        if own and shared is not None and start <= shared.tokens:
            return leave_shared(before, root)
        return before

    def _is_own(self, end: int) -> bool:
        shared = self.request.shared
        return shared is None or end > shared.tokens

    def forget_progress(self) -> None:
        """Preempted: every token must be computed, or found in the cache, again."""
        self.begun = True
        self.prefill_end = self.known
        self.computed = 0
        self.published = 0
        self.pages = []
        self.slot = None
        self.prompt_logprobs = []
