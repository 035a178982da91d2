"""Chooses a replica of one model for each request, and keeps account of what it sent where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from random import Random
from time import monotonic, perf_counter
from typing import Generic, Protocol

from cache.directory import Directory
from gateway.dispatch.chooser import Chooser
from gateway.dispatch.costs import ReplicaCosts
from gateway.dispatch.member import Condition, Member, ReplicaT_co
from gateway.dispatch.placement import Placement
from gateway.dispatch.prefix import Prefix
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.warmer import Warmer
from policies.answer_lengths import AnswerLengths
from policies.cost import Coefficients
from policies.prediction_biases import PredictionBiases
from policies.routing import Candidate, RouteRequest, RoutingPolicy

_BREAKER_POLL_S = 0.25
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

    Implements `Bookkeeper`. The directory is shared by all models: links of different tokenizers
    and names differ. `warmer` is told of what was sent where, if there is one.
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
        return self._chooser.name

    def use_policy(self, name: str, policy: RoutingPolicy) -> None:
        """Choose by another policy from the next request on."""
        self._chooser = Chooser(self.model, name, policy, self._random)
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
        chosen, policy = self._chooser.choose(request, offered)
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
        member = self._members[receipt.candidate.name]
        return Placement(self, member, receipt, prefix.of(member.block_tokens))

    def note_sent(self, receipt: Receipt, links: Sequence[bytes]) -> None:
        """See `Bookkeeper.note_sent`."""
        replica = receipt.candidate.name
        self._chooser.sent(replica)
        if links:
            news = self.directory.note_routed(replica, links, monotonic())
            if replica in self._tells_no_events and news < len(links):
                self.observer.routed(self.model, replica, links)
        self.observer.decided(receipt)

    def note_answer(self, receipt: Receipt, began_s: float) -> None:
        """See `Bookkeeper.note_answer`."""
        replica = receipt.candidate.name
        self._costs.answered(replica, began_s)
        if replica in self._members:
            self._biases.observe(
                replica,
                receipt.request.priority,
                receipt.request.flow,
                predicted_s=receipt.predicted_ttft_s,
                actual_s=began_s - receipt.decided_s,
                now_s=began_s,
            )
        self.observer.began(receipt)

    def note_served(
        self, receipt: Receipt, links: Sequence[bytes], cached_tokens: int, now_s: float
    ) -> None:
        """See `Bookkeeper.note_served`."""
        candidate = receipt.candidate
        self.directory.correct(
            candidate.name,
            links,
            cached_tokens,
            promised=candidate.cached,
            decided_s=receipt.decided_s,
            now_s=now_s,
        )

    def bias(self, replica: str, request: RouteRequest, now_s: float) -> float:
        """By how much first tokens have lately come later there than was predicted, for requests
        like this one, as a factor."""
        return self._biases.factor(replica, request.priority, request.flow, now_s)

    def _stands(self, receipt: Receipt) -> bool:
        """Whether deciding again would find the same."""
        if receipt is not self._newest or monotonic() - receipt.decided_s > _NEW_S:
            return False
        member = self._members.get(receipt.candidate.name)
        return member is not None and member.takes_requests()

    def _costs_at(self, now_s: float) -> Mapping[str, Coefficients]:
        costs = self._costs
        if costs.due(now_s):
            members = self._members.values()
            costs.update({each.name: each.replica.coefficients() for each in members}, now_s)
        return costs.costs

    def _tell_watchers(self) -> None:
        self._newest = None
        for watcher in self._watchers:
            watcher()


def _why_not(member: Member[ReplicaT_co]) -> str:
    health = member.health()
    if health.condition is Condition.SERVING:
        return "its breaker is open"
    return f"{health.condition}: {health.reason}" if health.reason else str(health.condition)
