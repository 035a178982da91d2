"""The record that travels through a request's journey."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from time import monotonic

from cache.block import Tier
from cache.report import CacheUse
from gateway.choice import Choice
from gateway.choice_times import ChoiceTimes
from gateway.dispatch.receipt import Receipt
from gateway.endpoints import Task
from gateway.http_call import Header, HttpCall
from gateway.limits.limiter import Reservation
from gateway.models import AnyModel
from gateway.peer import PeerTenant, peer_tenant
from gateway.prompts import Prompt
from gateway.reload import Snapshot
from gateway.tenants import Caller, Tenant, TenantCache
from gateway.terms import Terms
from gateway.wire.usage import Usage, sum_by_tier
from policies.pricing import FREE, Price, written_tokens


@dataclass(slots=True)
class Relayed:
    """What became of a request at remote servers: where it was sent, and what the one that answered
    said of its tokens."""

    receipts: list[Receipt] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    choices: int = 1
    stream: bool = False


@dataclass(slots=True)
class Request:
    """One request on its way. What a step finds out stays for the next ones and for the ledger.

    `endpoint` is its label in metrics and logs, `snapshot` the configuration that judges it from
    beginning to end; `choices` are those that have been submitted to replicas of ours, `relayed`
    what was sent to a remote server instead; times are monotonic seconds. `reservation` is there
    once limits have let it in; `batch` is the batch that it is a line of.
    """

    call: HttpCall
    endpoint: str
    snapshot: Snapshot
    caller: Caller | None = None
    tenant: Tenant | None = None
    terms: Terms = Terms()  # noqa: RUF009 - frozen
    batch: str = ""
    reservation: Reservation | None = None
    price: Price = FREE
    wants_price: bool = False
    wants_tiers: bool = False
    cache_owner: Tenant | None = None
    """Whose KV it is, where that is not `tenant`: a peer's tenant, which the peer's key speaks
    for."""
    peer: PeerTenant | None = None
    task: Task | None = None
    model: AnyModel | None = None
    prompts: list[Prompt] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    relayed: Relayed | None = None
    submitted_s: float | None = None
    first_token_s: float | None = None
    first_text_s: float | None = None
    last_token_s: float | None = None
    _choice_times: ChoiceTimes = field(default_factory=ChoiceTimes, init=False, repr=False)

    def authenticate(self) -> Tenant:
        """Whose key the call carries; raises a 401 ApiError. Who asks already is known where it
        was set."""
        if self.caller is None:
            self.caller = self.snapshot.key_ring.identify(self.call.header("authorization"))
        self.tenant = self.caller.tenant
        return self.tenant

    @property
    def limit_headers(self) -> list[Header]:
        """`x-ratelimit-*` and their like, once limits have let it in."""
        return [] if self.reservation is None else self.reservation.headers

    def read_peer(self, body: bytes | bytearray, secret: bytes) -> PeerTenant | None:
        """Whom a trusted peer speaks for, None where nobody does: the KV is that tenant's then.
        Raises a 401 ApiError for a peer that is not trusted."""
        assert self.tenant is not None
        peer = self.peer = peer_tenant(self.call, body, secret, time.time())
        if peer is not None:
            cache = TenantCache(scope=peer.cache_scope)
            self.cache_owner = replace(self.tenant, id=peer.id, cache=cache)
        return peer

    @property
    def promised(self) -> bool:
        """Whether what its tenant was promised is about this request: not where it runs in another
        class, nor where a peer has let it in, who counts, nor where it is a line of a batch, which
        is let in whenever there is room."""
        if self.tenant is None or self.peer is not None or self.batch:
            return False
        return self.terms.service_class is self.tenant.service_class

    @property
    def shows_receipt(self) -> bool:
        """Whether its answer may say where it ran."""
        return self.tenant is None or self.tenant.sees_receipt

    def note_token(self, made_s: float) -> None:
        """An output with tokens has arrived, which was made by then. It may have waited here for a
        client that does not read; the first one has not."""
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s = monotonic()
        else:
            self.last_token_s = max(self.first_token_s, made_s)
        if len(self.choices) > 1:
            self._choice_times.note(self.choices, made_s)

    def note_text(self) -> None:
        """Text has arrived that the client can show."""
        if self.first_text_s is None:
            self.first_text_s = monotonic()

    def usage(self) -> Usage:
        """Tokens so far, none before the engine has the request."""
        if self.relayed is not None:
            return Usage(
                prompt_tokens=self.relayed.prompt_tokens,
                # a remote server does not say which of its tiers they came from
                cached_by_tier={
                    Tier.DEVICE: self.relayed.cached_tokens,
                    Tier.DRAM: 0,
                    Tier.REDIS: 0,
                },
                completion_tokens=self.relayed.completion_tokens,
            )
        uses = self.cache_uses()
        return Usage(
            prompt_tokens=sum(len(self.prompts[index].token_ids) for index in uses),
            cached_by_tier=sum_by_tier(uses.values()),
            completion_tokens=sum(choice.text.generated for choice in self.choices),
        )

    def told_usage(self) -> Usage:
        """As `usage`, with the price and the tiers if the client wants them."""
        usage = self.usage()
        if self.wants_tiers and self.shows_receipt:
            usage = replace(usage, tells_tiers=True)
        return replace(usage, cost_nusd=self.cost_nusd(usage)) if self.wants_price else usage

    def cost_nusd(self, usage: Usage) -> int:
        """What it costs with this usage."""
        return self.price.request_nusd(
            uncached_tokens=usage.prompt_tokens - usage.cached_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            written_tokens=self.written_tokens(),
            batch=bool(self.batch),
        )

    def written_tokens(self) -> int:
        """Tokens that were computed and lie within what the request asked to keep: by breakpoints,
        by using or making a named prefix, or by `prompt_cache_retention`.

        Each prompt counts once, however many choices it has, and by the choice that found the
        least. Remote servers keep nothing for us.
        """
        if self.task is None or self.relayed is not None:
            return 0
        keeps_all = self.task.generation.keep_prompt_s is not None
        total = 0
        for index, use in self.cache_uses().items():
            if use is None:
                continue  # it has not run
            prompt = self.prompts[index]
            tokens = len(prompt.token_ids)
            kept = max((each.tokens for each in prompt.retention), default=0)
            total += written_tokens(tokens, use.cached_tokens, tokens if keeps_all else kept)
        return total

    def cache_uses(self) -> dict[int, CacheUse | None]:
        """How each prompt that the engine has met the cache, by its index.

        It is what its least lucky choice did: the others may have found what that one computed.
        None while that one has not run.
        """
        uses: dict[int, CacheUse | None] = {}
        for choice in self.choices:
            known = uses.setdefault(choice.prompt_index, choice.cache_use)
            if _cached_tokens(choice.cache_use) < _cached_tokens(known):
                uses[choice.prompt_index] = choice.cache_use
        return uses

    def streams(self) -> bool | None:
        """Whether its answer is streamed; None before its body was understood."""
        if self.relayed is not None:
            return self.relayed.stream
        return None if self.task is None else self.task.generation.stream

    def ttft_s(self) -> float | None:
        """From the request to its first token."""
        if self.first_token_s is None:
            return None
        return self.first_token_s - self.call.started_s

    def publish_s(self) -> float | None:
        """From the request to the first text that is part of its answer: later than the first token
        where a model thinks first."""
        if self.first_text_s is None:
            return None
        return self.first_text_s - self.call.started_s

    def queue_s(self) -> float | None:
        """From the request's last byte until it was sent to a replica."""
        if self.submitted_s is None or self.call.body_read_s is None:
            return None
        return self.submitted_s - self.call.body_read_s

    def tpot_s(self) -> float | None:
        """Between two tokens of one choice, on average. A remote server's choices are taken to be
        equally long and to run side by side."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        if len(self.choices) > 1:
            return self._choice_times.tpot_s(self.choices)
        return self.tpot_of_s(self.last_token_s - self.first_token_s)

    def tpot_of_s(self, tokens_s: float) -> float | None:
        """That of choices side by side, if their tokens took so long from the first to the last;
        None if there are no two of one choice."""
        if self.relayed is not None:
            tokens, choices = self.relayed.completion_tokens, self.relayed.choices
        else:
            tokens = sum(choice.text.generated for choice in self.choices)
            choices = len(self.choices)
        gaps = tokens - choices
        return tokens_s * choices / gaps if gaps >= 1 else None

    def receipts(self) -> list[Receipt]:
        """Every decision about where its prompts go, in order within each."""
        if self.relayed is not None:
            return self.relayed.receipts
        return [receipt for choice in self.choices for receipt in choice.receipts]


def _cached_tokens(use: CacheUse | None) -> int:
    return 0 if use is None else use.cached_tokens
