"""One try at having a request answered by one replica: sent, judged, and its times taken."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from itertools import count
from time import time
from typing import NamedTuple

from gateway.errors import ApiError
from gateway.peer import HEADER as PEER_HEADER
from gateway.peer import PeerTenant, sign
from gateway.remote.body import PATHS, RelayBody, upstream_body
from gateway.remote.course import RemotePlacement
from gateway.remote.exchange import Exchange, Patience
from gateway.remote.failures import ERROR_BODY_BYTES, LossKind, UpstreamLost, judge
from gateway.remote.own_load import OwnRequest
from gateway.remote.prompt import RoutedPrompt
from gateway.remote.usage import ReportedUsage, estimated_for_all
from gateway.settings_fleet import KNOWS_SALTS
from gateway.tenants import Tenant
from gateway.terms import TIMEOUT, Terms, seconds_left

_LEAST_EVENTS = 8
"""Of a stream from which the time between two tokens is learned."""
_EXPLANATION_S = 2.0
"""How long to wait for the body of an answer whose status says that there is none."""
_LONGEST_ID = 96
_ids = count(secrets.randbits(48) << 16)
"""Endings of request ids: no two alike, in other gateways either."""


class Errand(NamedTuple):
    """What is the same in every try: the request and whose it is. `salt` keeps its tenant apart,
    `alone` is whether it shares KV with nobody, `seed` makes the answer one that can be had
    again. `terms` are those on which it runs."""

    body: RelayBody
    prompt: RoutedPrompt
    tenant: Tenant
    request_id: str
    salt: str
    alone: bool
    seed: int
    secret: bytes
    terms: Terms = Terms()

    def written_for(self, placement: RemotePlacement) -> tuple[bytes, dict[str, str]]:
        """The body and the headers that this replica gets; of the client's own headers, none.

        The request's id gets an ending of its own each time: servers take it for the name of a
        request, and clients may use one twice.
        """
        replica = placement.replica
        sent = upstream_body(
            self.body,
            engine=replica.engine,
            served_model=replica.served_model,
            shares_cache=replica.shares_cache,
            salt=self.salt,
            seed=self.seed,
        )
        request_id = f"{self.request_id[:_LONGEST_ID]}.{next(_ids):x}"
        headers = {
            "accept": "text/event-stream" if self.body.stream else "application/json",
            "x-request-id": request_id,
        }
        if replica.engine == "forebay":
            terms = self.terms
            peer = PeerTenant(
                self.tenant.id,
                self.tenant.cache_scope,
                terms.service_class,
                terms.weight,
                terms.due_s,
                terms.tpot_s,
            )
            if (left_s := seconds_left(terms)) is not None:
                headers[TIMEOUT] = str(max(1, round(left_s * 1e3)))
            headers[PEER_HEADER] = sign(
                self.secret, peer, request_id=request_id, body=sent, now_s=time()
            )
        return sent, headers


class Attempt:
    """One exchange. `open` it, and `close` it on every path; both may be called from any task.

    Opening raises what the server's status means: UpstreamLost, UpstreamFull, UpstreamAway,
    UpstreamMisconfigured or, for the client's own mistake, ApiError.
    """

    def __init__(self, errand: Errand, placement: RemotePlacement, predicted_ttft_s: float) -> None:
        self._errand = errand
        self.placement = placement
        self._predicted_ttft_s = predicted_ttft_s
        self._own = OwnRequest(placement.replica.own_load)
        self._exchange: Exchange | None = None
        self._began_s: float | None = None
        self._last_s = 0.0
        self._events = 0
        self._tokens = 0
        self._finished = False
        self._presumption: asyncio.TimerHandle | None = None

    async def open(self) -> Exchange:
        """Send the request; the answer, whose status is 200, from its head on."""
        replica, body = self.placement.replica, self._errand.body
        sent, headers = self._errand.written_for(self.placement)
        first_s = replica.times.first_s + self._predicted_ttft_s
        if not body.stream:
            first_s = max(first_s, replica.times.whole_s)
            # when it begins cannot be seen, and it must not count as waiting to its end
            self._presumption = asyncio.get_running_loop().call_later(
                self._predicted_ttft_s, self._presume_begun
            )
        self._own.start(self._errand.prompt.tokens)
        exchange = self._exchange = replica.exchange(
            PATHS[body.endpoint], sent, headers, Patience(first_s, first_s)
        )
        await exchange.open()
        if exchange.status != 200:
            raise await self._judged(exchange)
        return exchange

    def close(self) -> None:
        """End the exchange, unless it has come to its end. Idempotent."""
        if self._exchange is not None and not self._finished:
            self._exchange.close()
        if self._presumption is not None:
            self._presumption.cancel()
        # of choices side by side each is as long as one of them
        self.placement.answered(-(-(self._tokens or self._events) // self._errand.body.choices))
        self._own.end()

    def note_tokens(self, events: int, heard_s: float) -> None:
        """So many events of a streamed answer have come, the last of them at `heard_s`; the first
        time, it has begun."""
        self._last_s = heard_s
        self._events += events
        if self._began_s is not None or self._exchange is None:
            return
        self._began_s = heard_s
        self._own.begin()
        self.placement.began(None)
        self._exchange.be_patient(self.placement.replica.times.between_s)

    def _presume_begun(self) -> None:
        self._own.begin()
        self.placement.presumed_begun()

    def finish(self, usage: ReportedUsage | None) -> None:
        """The answer is whole: learn from it, and leave the connection to the next."""
        in_links = None
        if usage is not None:
            self._tokens = usage.completion_tokens
        if usage is not None and usage.cached_tokens is not None:
            in_links = self._errand.prompt.in_links(usage.cached_tokens, usage.prompt_tokens)
            self.placement.served(usage.cached_tokens, in_links)
            if usage.cached_tokens and self._can_have_nothing_cached:
                self.placement.replica.kept_nobody_apart()
        self.placement.member.answered()
        ttft_s, gap_s = None, None
        if self._began_s is not None and self._exchange is not None:
            ttft_s = self._began_s - self._exchange.sent_s
            if self._events >= _LEAST_EVENTS:
                gap_s = (self._last_s - self._began_s) / (self._events - 1)
        self.placement.replica.succeeded(
            self.placement.receipt, ttft_s=ttft_s, cached_tokens=in_links, token_gap_s=gap_s
        )
        if self._exchange is not None:
            self._finished = True
            self._exchange.finish()

    def estimate_for_all(self, first: ReportedUsage, choices: Sequence[object]) -> ReportedUsage:
        """The usage of a whole answer whose server has told that of its first choice alone."""
        body, prompt = self._errand.body, self._errand.prompt
        return estimated_for_all(
            first,
            choices,
            max_tokens=body.max_tokens,
            prompts=body.prompts,
            prompt_tokens=prompt.tokens,
        )

    @property
    def _can_have_nothing_cached(self) -> bool:
        """Whether nothing of the prompt can have been computed before under this salt: neither for
        another request, nor for another choice of this one, nor in a try that was lost."""
        errand, placement = self._errand, self.placement
        return (
            errand.alone
            and errand.body.choices == 1
            and placement.receipt.moved_from is None
            and placement.replica.engine in KNOWS_SALTS
        )

    async def _judged(self, exchange: Exchange) -> Exception:
        """The exception that the answer's status means; what can be read of its body explains."""
        try:
            async with asyncio.timeout(_EXPLANATION_S):
                body = await exchange.read_all(ERROR_BODY_BYTES)
        except (UpstreamLost, ApiError, TimeoutError):
            body = b""  # broken off, too long or too slow: the status has to do
        cleaner = self.placement.replica.cleaner
        return judge(exchange.status, exchange.header("retry-after"), body, cleaner)


def require_content_type(exchange: Exchange, wanted: str) -> None:
    """Raises UpstreamLost for an answer of another kind."""
    given = (exchange.header("content-type") or "").partition(";")[0].strip().lower()
    if given != wanted:
        raise UpstreamLost(LossKind.GARBAGE, "another kind of answer")
