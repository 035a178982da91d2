"""One tenant's side of the shared limits: which of its requests are in flight here, and what Redis
is to be told of them, in order and once."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from gateway.limits.calls import (
    Adopt,
    BudgetPart,
    Operation,
    Release,
    Renew,
    Settle,
    Spend,
    Undo,
    account_name,
    account_of,
)
from gateway.limits.journal import Journal
from policies.limit_account import Holding
from policies.limit_book import LimitBook
from policies.limit_standing import AccountId, Ceiling, Standing
from policies.limit_window import WindowShape

_MOST_OPERATIONS = 100
"""In one call of the script: it holds up all others."""
_MOST_EPOCHS = 16


class InFlight:
    """One request. `told` is whether Redis has a record of it, or is going to; `noted_tokens` are
    what it counts in the standings that were noted since; `counted` are the accounts in whose
    windows it is."""

    __slots__ = ("counted", "holding", "id", "noted_tokens", "parts", "settled_s", "told")

    def __init__(
        self,
        request: str,
        holding: Holding,
        parts: tuple[BudgetPart, ...],
        counted: frozenset[str],
        *,
        told: bool,
    ) -> None:
        self.counted = counted
        self.id = request
        self.holding = holding
        self.noted_tokens = holding.tokens
        self.parts = parts
        self.told = told
        self.settled_s: float | None = None

    @property
    def budgets(self) -> tuple[BudgetPart, ...]:
        """Those that it counts against."""
        return tuple(part for part in self.parts if part.kind)


class Batch:
    """Operations under their number, sent again under the same one where it is not known whether
    they have arrived. They build on what a hash with the mark `epoch` holds, and on the batch
    `before`, if that had not been confirmed (else 0)."""

    __slots__ = ("before", "epoch", "number", "operations")

    def __init__(
        self, number: int, before: int, epoch: str | None, operations: list[Operation]
    ) -> None:
        self.number = number
        self.before = before
        self.epoch = epoch
        self.operations = operations


class Desk:
    """Event loop only. Times are of the limiter's clock."""

    def __init__(self, tenant: str, shape: WindowShape, now_s: float) -> None:
        self.tenant = tenant
        self.epoch: str | None = None
        self.in_flight: dict[str, InFlight] = {}
        self.used_s = now_s
        self.memory_losses = 0
        self._shape = shape
        self._accounts: dict[AccountId, tuple[Standing, float]] = {}
        self._journal = Journal(shape)
        self._to_tell: deque[Operation] = deque()
        self._outstanding: list[Batch] = []
        self._past_epochs: deque[str] = deque(maxlen=_MOST_EPOCHS)

    @property
    def behind(self) -> bool:
        """Whether there is anything to tell that has not been sent."""
        return bool(self._to_tell)

    @property
    def waits(self) -> bool:
        """Whether something was sent of which it is not known yet that it has arrived."""
        return bool(self._outstanding)

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost if it was forgotten."""
        return not (self.backlog or self.in_flight)

    @property
    def backlog(self) -> int:
        """Entries that Redis is yet to be told, or to confirm."""
        sent = sum(len(batch.operations) for batch in self._outstanding)
        return sent + len(self._to_tell) + len(self._journal)

    def note(
        self, ceilings: Sequence[Ceiling], standings: Sequence[Standing], now_s: float
    ) -> None:
        """How accounts stand now."""
        for (account, _), standing in zip(ceilings, standings, strict=True):
            self._accounts[account] = (standing, now_s)

    def standing(self, account: AccountId, now_s: float) -> Standing:
        """As last noted, less what has passed since."""
        standing, at_s = self._accounts.get(account, (Standing(0, 0, 0), now_s))
        left_s = standing.reset_s - (now_s - at_s)
        if left_s > 0:
            return standing._replace(reset_s=left_s)
        return standing._replace(requests=0, tokens=0, reset_s=0.0)

    def take_in(self, request: InFlight, now_s: float) -> None:
        """It is in flight."""
        self.in_flight[request.id] = request
        self.used_s = now_s

    def settled(self, request: InFlight, now_s: float) -> None:
        """Its holding has been settled in the book."""
        request.settled_s = now_s
        holding = request.holding
        self._correct(request, 0, holding.tokens - request.noted_tokens, now_s)
        if request.told:
            self._to_tell.append(
                Settle(request.id, holding.tokens, holding.cost_nusd, now_s, request.budgets)
            )

    def over(self, request: InFlight, now_s: float) -> None:
        """Its holding has been released in the book."""
        if self.in_flight.pop(request.id, None) is None:
            return
        self.used_s = now_s
        holding = request.holding
        if not holding.settled:
            self._correct(request, -1, -request.noted_tokens, now_s)
        if request.told:
            self._to_tell.append(Release(request.id) if holding.settled else Undo(request.id))
        elif request.settled_s is not None:
            self._journal.count(request.counted, holding.bucket, 1, holding.tokens)
            self._journal.spend(request.budgets, holding.cost_nusd, request.settled_s)

    def _correct(self, request: InFlight, requests: int, tokens: int, now_s: float) -> None:
        """What was noted of its accounts, as it counts differently now: Redis is asked again only
        by the tenant's next request, and a refusal is to say how much is left."""
        if now_s >= self._shape.gone_s(request.holding.bucket):
            return
        for name in request.counted:
            account = account_of(self.tenant, name)
            if (noted := self._accounts.get(account)) is None:
                continue
            standing, at_s = noted
            requests_now = max(0, standing.requests + requests)
            tokens_now = max(0, standing.tokens + tokens)
            reset_s = standing.reset_s if requests_now or tokens_now else 0.0
            corrected = standing._replace(requests=requests_now, tokens=tokens_now, reset_s=reset_s)
            self._accounts[account] = (corrected, at_s)

    def undo(self, request: str) -> None:
        """It is not known whether Redis has let it in; it shall not have."""
        self._to_tell.append(Undo(request))

    def tell_all(self) -> None:
        """Whatever was decided here alone is to be told, once what was sent has arrived: until
        then it is kept summed up."""
        if self._outstanding:
            return
        for request in self.in_flight.values():
            if not request.told:
                self.adopt(request)
        self._to_tell += self._journal.drain()

    def adopt(self, request: InFlight, *, in_windows: bool = True) -> None:
        """A request in flight that Redis may have no record of."""
        untold, request.told = not request.told, True
        holding = request.holding
        if untold and request.settled_s is not None:
            self._to_tell += [
                Spend(part, holding.cost_nusd, request.settled_s) for part in request.budgets
            ]
        self._to_tell.append(
            Adopt(
                request.id,
                in_windows,
                holding.started_s,
                holding.tokens,
                holding.cost_nusd,
                holding.settled,
                request.parts,
                request.counted,
            )
        )

    def renew(self) -> None:
        """Its requests are still in flight. Says nothing new if there are none, which is a way to
        ask for the epoch."""
        said = [each for each in self._to_tell if not isinstance(each, Renew)]
        ids = [request.id for request in self.in_flight.values() if request.told]
        renewed = [
            Renew(tuple(ids[start : start + _MOST_OPERATIONS]))
            for start in range(0, max(1, len(ids)), _MOST_OPERATIONS)
        ]
        self._to_tell = deque([*said, *renewed])

    def without_lease(self, missing: list[str]) -> None:
        """Requests of which Redis has thought that nobody looks after them."""
        for request_id in missing:
            request = self.in_flight.get(request_id)
            if request is not None and request.told:
                self.adopt(request, in_windows=False)

    def next_batch(self, numbers: Iterator[int]) -> Batch:
        """What is to be sent now, after all that was sent before."""
        take = min(_MOST_OPERATIONS, len(self._to_tell))
        operations = [self._to_tell.popleft() for _ in range(take)]
        before = self._outstanding[-1].number if self._outstanding else 0
        batch = Batch(next(numbers), before, self.epoch, operations)
        self._outstanding.append(batch)
        return batch

    def all_batches(self, numbers: Iterator[int]) -> list[Batch]:
        """What has to be sent again, in order, or all that is new if there is nothing of that."""
        before = 0
        for batch in self._outstanding:
            batch.before, before = before, batch.number
        if not self._outstanding:
            while self._to_tell:
                self.next_batch(numbers)
        return list(self._outstanding)

    def arrived(self, batch: Batch) -> None:
        """It has been applied."""
        self._outstanding = [each for each in self._outstanding if each is not batch]

    def heard(self, epoch: str, book: LimitBook) -> bool:
        """What the hash is marked with; False if Redis has forgotten that one since.

        With a new mark it has forgotten all that it had been told before: requests in flight are to
        be adopted, and those of the last minute counted, again. What they cost, the ledger knows,
        but for what was settled after it was asked.
        """
        if epoch == self.epoch:
            return True
        if epoch in self._past_epochs:
            return False
        if self.epoch is None:
            for batch in self._outstanding:
                batch.epoch = epoch
        else:
            self._past_epochs.append(self.epoch)
            self.memory_losses += 1
            self._start_over(book)
        self.epoch = epoch
        return True

    def _start_over(self, book: LimitBook) -> None:
        sent = [operation for batch in self._outstanding for operation in batch.operations]
        waiting = [*sent, *self._to_tell]
        self._outstanding.clear()
        self._to_tell.clear()
        for operation in waiting:
            if isinstance(operation, Settle):
                cost, at_s = operation.cost_nusd, operation.at_s
                self._to_tell += [Spend(part, cost, at_s) for part in operation.budgets]
            elif isinstance(operation, Spend | Undo):
                self._to_tell.append(operation)
        for request in self.in_flight.values():
            if request.told:
                self.adopt(request)
        for account_id in self._accounts:
            account = book.known(account_id)
            if account is not None:
                name = account_name(account_id)
                self._journal.recount(name, self._over(name, account.window.content()))
        self.tell_all()

    def _over(
        self, account: str, content: Iterator[tuple[int, int, int]]
    ) -> Iterator[tuple[int, int, int]]:
        """A window's content without that of requests in flight."""
        held: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        for request in self.in_flight.values():
            if account in request.counted:
                held[request.holding.bucket][0] += 1
                held[request.holding.bucket][1] += request.holding.tokens
        for bucket, requests, tokens in content:
            yield bucket, requests - held[bucket][0], tokens - held[bucket][1]
