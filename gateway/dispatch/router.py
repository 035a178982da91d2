"""Chooses a replica of one model for each request, and keeps account of what it sent where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import index
from random import Random
from time import monotonic, perf_counter
from types import TracebackType
from typing import Generic, Protocol

import structlog

from cache.directory import Directory
from gateway.dispatch.costs import ReplicaCosts
from gateway.dispatch.load import LoadShare
from gateway.dispatch.member import Condition, Member, ReplicaT_co
from gateway.dispatch.prefix import Prefix
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.warmer import Warmer
from policies.answer_lengths import AnswerLengths
from policies.cost import Coefficients
from policies.prediction_biases import PredictionBiases
from policies.routing import Candidate, RouteRequest, RoutingPolicy
from policies.routing_ttft import PredictedTtft

_log = structlog.get_logger("forebay.routing")

_BREAKER_POLL_S = 0.25
_FALLBACK = "predicted-ttft"
_NEW_S = 0.005
"""So long a decision stands if nothing that it goes by is seen to have changed."""


class NoReplica(Exception):
    """No replica can take the request now. `full`: there are some, and every place is taken."""

    def __init__(self, message: str, *, full: bool) -> None:
        super().__init__(message)
        self.full = full


class RouterObserver(Protocol):
    """Who wants to know of decisions and what came of them: metrics, and other gateways."""

    def decided(self, receipt: Receipt) -> None:
        """A request is being sent somewhere."""
        ...

    def began(self, receipt: Receipt) -> None:
        """Its first token has come."""
        ...

    def routed(self, model: str, replica: str, links: Sequence[bytes]) -> None:
        """A replica that tells no events was sent a prompt with these links, some of them new."""
        ...


class Router(Generic[ReplicaT_co]):
    """One model's replicas. Belongs to the event loop.

    The directory is shared by all models: links of different tokenizers and names differ. A policy
    that fails, which may be anybody's, is stood in for by predicted-ttft and logged once.
    `warmer` is told of what was sent where, if there is one.
    """

    def __init__(
        self,
        model: str,
        directory: Directory,
        policy: RoutingPolicy,
        policy_name: str,
        random: Random,
        observer: RouterObserver,
    ) -> None:
        self.model = model
        self.observer = observer
        self.directory = directory
        self.warmer: Warmer | None = None
        self._answers = AnswerLengths()
        self._costs = ReplicaCosts()
        self._fallback = PredictedTtft()
        self._random = random
        self._members: dict[str, Member[ReplicaT_co]] = {}
        self._tells_no_events: set[str] = set()
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = []
        self._newest: Receipt | None = None
        """The last decision, until something changes that it went by."""
        self._biases = PredictionBiases()
        self.use_policy(policy_name, policy)

    @property
    def members(self) -> Sequence[Member[ReplicaT_co]]:
        """All of them, whatever their condition."""
        return tuple(self._members.values())

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self._policy_name

    def use_policy(self, name: str, policy: RoutingPolicy) -> None:
        """Choose by another policy from the next request on."""
        self._policy_name, self._policy = name, policy
        self._tell_policy: Callable[[str], object] | None = getattr(policy, "sent", None)
        self._policy_failed = False
        self._newest = None

    def add(self, member: Member[ReplicaT_co], *, tells_events: bool) -> None:
        """One more replica; it has joined the directory already. Raises ValueError for a name that
        is taken."""
        if member.name in self._members:
            raise ValueError(f"replica {member.name} is there already")
        member.load.learn_with(self._answers)
        member.load.listen(self._tell_watchers)
        self._members[member.name] = member
        if not tells_events:
            self._tells_no_events.add(member.name)
        self.changed()

    def remove(self, name: str) -> Member[ReplicaT_co] | None:
        """Send nothing there any more, and forget what it holds."""
        self._tells_no_events.discard(name)
        self._costs.forget(name)
        self._biases.forget(name)
        self.directory.leave(name)
        self.changed()
        return self._members.pop(name, None)

    def find(self, name: str) -> Member[ReplicaT_co] | None:
        """The replica of this name."""
        return self._members.get(name)

    def changed(self) -> None:
        """A replica's condition has changed: whoever waits for one that serves looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
        for member in self._members.values():
            if member.replica.health().condition is not Condition.SERVING:
                self._costs.forget(member.name)
        self._costs.outdated()
        if self.warmer is not None:
            self.warmer.targets_changed()
        self._tell_watchers()

    @contextmanager
    def watched(self, watcher: Callable[[], None]) -> Iterator[None]:
        """A scope, in which `watcher` is called whenever a request may fare otherwise than before:
        often, so that it has to be quick, and must not change anything here."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    @property
    def serves(self) -> bool:
        """Whether any replica takes requests."""
        return any(member.takes_requests() for member in self._members.values())

    @property
    def has_room(self) -> bool:
        """Whether any replica would take one more request now."""
        for member in self._members.values():
            if member.takes_requests() and not member.load.standing().full:
                return True
        return False

    async def wait_until_serving(self, timeout_s: float) -> bool:
        """Wait until a replica takes requests, as long as one may come back; False if none does."""
        deadline_s = monotonic() + timeout_s
        while not self.serves:
            rest_s = deadline_s - monotonic()
            if rest_s <= 0 or not any(member.may_return() for member in self._members.values()):
                return False
            # conditions are announced; a breaker's time only passes
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(rest_s, _BREAKER_POLL_S))
        return True

    def decide(
        self,
        request: RouteRequest,
        prefix: Prefix,
        *,
        exclude: Collection[str] = frozenset(),
        moved_from: str | None = None,
        had_begun: bool = False,
    ) -> Receipt:
        """Choose, and send nothing. Raises NoReplica."""
        started_s = perf_counter()
        now_s = monotonic()
        costs = self._costs_at(now_s)
        sizes = {member.block_tokens for member in self._members.values()}
        warm = self.directory.lookup(prefix.by_size(sizes), now_s)
        candidates: list[Candidate] = []
        passed_by: dict[str, str] = {}
        priority, cached_by = request.priority, warm.get
        for name, member in self._members.items():
            if name in exclude:
                passed_by[name] = "lost this request before"
                continue
            candidate = member.candidate(costs[name], priority, cached_by(name))
            if candidate is None:
                passed_by[name] = _why_not(member)
            else:
                candidates.append(candidate)
        if not candidates:
            raise NoReplica("No replica of this model can serve now.", full=False)
        # a policy may be anybody's, and must not take any of them away
        offered = tuple(candidates)
        chosen, policy = self._choose(request, offered)
        if offered[chosen].standing.full:
            raise NoReplica("Every place in the replicas' queues is taken.", full=True)
        self._newest = receipt = Receipt(
            model=self.model,
            policy=policy,
            request=request,
            candidates=offered,
            chosen=chosen,
            decided_s=now_s,
            decision_s=perf_counter() - started_s,
            passed_by=passed_by,
            moved_from=moved_from,
            had_begun=had_begun,
        )
        return receipt

    def place(
        self,
        request: RouteRequest,
        prefix: Prefix,
        *,
        exclude: Collection[str] = frozenset(),
        moved_from: str | None = None,
        had_begun: bool = False,
        foreseen: Receipt | None = None,
    ) -> Placement[ReplicaT_co]:
        """Choose a replica, and count the request there for as long as the result's scope lasts;
        enter it before anything else is decided. Raises NoReplica.

        `foreseen` is what was decided about the same request, with nothing excluded, when it was
        let in: that stands if nothing has happened since.
        """
        if foreseen is not None and self._stands(foreseen):
            receipt = foreseen
        else:
            receipt = self.decide(
                request, prefix, exclude=exclude, moved_from=moved_from, had_begun=had_begun
            )
        return Placement(self, self._members[receipt.candidate.name], receipt, prefix)

    def _stands(self, receipt: Receipt) -> bool:
        """Whether deciding again would find the same."""
        if receipt is not self._newest or monotonic() - receipt.decided_s > _NEW_S:
            return False
        member = self._members.get(receipt.candidate.name)
        return member is not None and member.takes_requests()

    def _choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[int, str]:
        """Which candidate, and by which policy."""
        if len(candidates) == 1:
            return 0, self._policy_name  # there is nothing to choose
        try:
            chosen = index(self._policy.choose(request, candidates, self._random))
            if not 0 <= chosen < len(candidates):
                raise IndexError(f"it chose number {chosen} of {len(candidates)}")
        except Exception as failure:  # noqa: BLE001 - a policy may be anybody's, and fail in any way
            self._note_failure(failure, instead=_FALLBACK)
            return self._fallback.choose(request, candidates, self._random), _FALLBACK
        return chosen, self._policy_name

    def _note_failure(self, failure: Exception, instead: str | None) -> None:
        if not self._policy_failed:
            self._policy_failed = True
            _log.error(
                "routing policy failed",
                policy=self._policy_name,
                model=self.model,
                instead=instead,
                exc_info=failure,
            )

    def _note_sent(self, replica: str) -> None:
        if self._tell_policy is None:
            return
        try:
            self._tell_policy(replica)
        except Exception as failure:  # noqa: BLE001 - as above; what it chooses is followed still
            self._note_failure(failure, instead=None)

    def _costs_at(self, now_s: float) -> Mapping[str, Coefficients]:
        costs = self._costs
        if costs.due(now_s):
            members = self._members.values()
            costs.update({each.name: each.replica.coefficients() for each in members}, now_s)
        return costs.costs

    def note_answer(self, receipt: Receipt, began_s: float) -> None:
        """A replica has begun to answer a request."""
        replica = receipt.candidate.name
        self._costs.answered(replica, began_s)
        if replica in self._members:
            self._biases.observe(
                receipt.candidate.name,
                receipt.request.priority,
                receipt.request.flow,
                predicted_s=receipt.predicted_ttft_s,
                actual_s=began_s - receipt.decided_s,
                now_s=began_s,
            )

    def bias(self, replica: str, request: RouteRequest, now_s: float) -> float:
        """By how much first tokens have lately come later there than was predicted, for requests
        like this one, as a factor."""
        return self._biases.factor(replica, request.priority, request.flow, now_s)

    def _tell_watchers(self) -> None:
        self._newest = None
        for watcher in self._watchers:
            watcher()

    def _note_routed(self, member: Member[ReplicaT_co], prefix: Prefix) -> None:
        links = prefix.of(member.block_tokens)
        if not links:
            return
        news = self.directory.note_routed(member.name, links, monotonic())
        if member.name in self._tells_no_events and news < len(links):
            self.observer.routed(self.model, member.name, links)


class Placement(Generic[ReplicaT_co]):
    """A request at a replica: a scope, in which it counts there."""

    __slots__ = ("_prefix", "_probing", "_router", "_share", "member", "receipt")

    def __init__(
        self,
        router: Router[ReplicaT_co],
        member: Member[ReplicaT_co],
        receipt: Receipt,
        prefix: Prefix,
    ) -> None:
        request, cached = receipt.request, receipt.candidate.cached
        uncached = max(1, request.prompt_tokens - cached.tokens)
        self.member = member
        self.receipt = receipt
        self._router = router
        self._prefix = prefix
        self._probing = False
        self._share: LoadShare = member.load.share(
            uncached, request.prompt_tokens, request.priority, request.flow, request.weight
        )

    def __enter__(self) -> Placement[ReplicaT_co]:
        breaker = self.member.breaker
        self._probing = not breaker.closed and breaker.start_probe(monotonic())
        self._share.__enter__()
        try:
            self._router._note_sent(self.member.name)
            self._router._note_routed(self.member, self._prefix)
            self._router.observer.decided(self.receipt)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._share.end()
        if self._probing and self.receipt.began_s is None and self.receipt.lost is None:
            # the probe told nothing: its client left first
            self.member.breaker.probe_failed(monotonic())

    @property
    def replica(self) -> ReplicaT_co:
        """Where it runs."""
        return self.member.replica

    def began(self, served_tokens: int | None) -> None:
        """Its first token has come; so many of its prompt's tokens came from the cache (None: the
        replica does not say). Idempotent."""
        receipt = self.receipt
        if receipt.began_s is not None:
            return
        receipt.began_s = monotonic()
        receipt.served_tokens = served_tokens
        self._share.begin()
        self.member.answered()
        self._router.note_answer(receipt, receipt.began_s)
        if served_tokens is not None:
            links = self._prefix.of(self.member.block_tokens)
            if links:
                self._router.directory.correct(
                    self.member.name,
                    links,
                    served_tokens,
                    promised=receipt.candidate.cached,
                    decided_s=receipt.decided_s,
                    now_s=receipt.began_s,
                )
        self._router.observer.began(receipt)

    def served(self, cached_tokens: int, in_links: int) -> None:
        """It has turned out, after it began, that so many of its prompt's tokens came from the
        cache; they are `in_links` tokens in the unit of the prefix's links."""
        self.receipt.served_tokens = cached_tokens
        links = self._prefix.of(self.member.block_tokens)
        if links:
            receipt = self.receipt
            self._router.directory.correct(
                self.member.name,
                links,
                in_links,
                promised=receipt.candidate.cached,
                decided_s=receipt.decided_s,
                now_s=monotonic(),
            )

    def presumed_begun(self) -> None:
        """It runs by now, as was predicted; nobody will say when it began. Idempotent."""
        self._share.begin()

    def answered(self, tokens: int) -> None:
        """So many tokens were generated there, in all; said before it ends, or never."""
        self._share.answered(tokens)

    def lost(self, why: str) -> None:
        """The replica has lost it, or did not take it."""
        self.receipt.lost = why
        self.member.failed()


def _why_not(member: Member[ReplicaT_co]) -> str:
    health = member.health()
    if health.condition is Condition.SERVING:
        return "its breaker is open"
    return f"{health.condition}: {health.reason}" if health.reason else str(health.condition)
