"""The front desk: which replica a request goes to, by the policies' code, and what it is told of
what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loadtest.simulate.books import Book
from loadtest.simulate.clock import Clock
from loadtest.simulate.directory import BlockDirectory, Sent, Warm
from loadtest.simulate.job import SimJob
from loadtest.simulate.replica import Replica
from loadtest.simulate.spec import SimSpec
from policies.answer_lengths import AnswerLengths
from policies.routing import Candidate, Prediction, RouteRequest
from policies.routing_policies import BUILT_IN
from policies.routing_prediction import predict
from policies.routing_shortlist import SHORTLISTS, Holders


class Choice(NamedTuple):
    """A replica, by number, and the candidate that it was."""

    replica: int
    candidate: Candidate
    request: RouteRequest

    @property
    def prediction(self) -> Prediction:
        """Of the time to the first token."""
        return predict(self.request, self.candidate)


class Placement(NamedTuple):
    """What the desk has noted of a job that it has sent somewhere."""

    book: Book
    uncached_tokens: int
    sent: Sent | None


class Listener(Protocol):
    """Who wants to know what the desk hears."""

    def began(self, job: SimJob) -> None:
        """A job has its first token."""

    def changed(self) -> None:
        """A request may fare otherwise than before."""


class FrontDesk:
    """Sends jobs to `replicas` by the policy `policy`, whatever the spec's is. `directory` says who
    has what, with a bit for each of them; None: nobody has anything. `detailed`: by class and flow.
    """

    def __init__(
        self,
        spec: SimSpec,
        policy: str,
        clock: Clock,
        replicas: Sequence[Replica],
        directory: BlockDirectory | None,
        *,
        detailed: bool,
        seed: str,
    ) -> None:
        self.directory = directory
        self._clock = clock
        self._cost = cost = spec.cost
        self._replicas = replicas
        self._policy = BUILT_IN[policy]()
        self._random = Random(seed)
        self._delay_s = spec.report_delay_s
        answers = AnswerLengths()
        self._books = [
            Book(f"r{each.index}", cost, spec.max_running, answers, detailed=detailed)
            for each in replicas
        ]
        self._numbers = {book.name: number for number, book in enumerate(self._books)}
        self._changed = set(range(len(replicas)))
        few = len(replicas) <= 2 * spec.shortlist or not spec.shortlist
        self._shortlist = None if few else SHORTLISTS[policy](cost, len(replicas), spec.shortlist)
        self._placements: dict[int, Placement] = {}
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Tell this one, and nobody else, of what is heard."""
        self._listener = listener

    def choose(self, job: SimJob) -> Choice:
        """Where it would go now; changes nothing."""
        promised_by_s = job.promised_by_s
        due_s = None if promised_by_s is None else promised_by_s - self._clock.now_s
        request = RouteRequest(
            job.prompt_tokens, job.max_tokens, job.rank.priority, job.flow, job.weight, due_s
        )
        warm: list[Warm] = []
        if self.directory is not None and job.blocks:
            warm = self.directory.lookup(job.blocks, job.prompt_tokens)
        candidates = self._candidates(request, warm)
        chosen = 0
        if len(candidates) > 1:
            chosen = self._policy.choose(request, candidates, self._random)
        candidate = candidates[chosen]
        return Choice(self._numbers[candidate.name], candidate, request)

    def place(self, job: SimJob, choice: Choice) -> Replica:
        """It goes there."""
        replica = self._replicas[choice.replica]
        book = self._books[choice.replica]
        uncached = max(1, job.prompt_tokens - choice.candidate.cached.tokens)
        book.placed(job, uncached, self._clock.now_s)
        self._changed.add(choice.replica)
        sent = None
        if self.directory is not None and job.blocks:
            sent = self.directory.expect(1 << choice.replica, job.blocks)
        self._placements[job.index] = Placement(book, uncached, sent)
        job.replica, job.replica_name = replica.index, book.name
        return replica

    def began(self, job: SimJob) -> None:
        """A job that was sent somewhere has its first token; the desk hears of it in time."""
        if self._delay_s:
            self._clock.at(self._clock.now_s + self._delay_s, lambda _: self._note_began(job))
        else:
            self._note_began(job)

    def ended(self, job: SimJob, answer_tokens: int) -> None:
        """It has left the replica, where so many tokens were generated; the desk hears of it in
        time."""
        if self._delay_s:
            due_s = self._clock.now_s + self._delay_s
            self._clock.at(due_s, lambda _: self._note_ended(job, answer_tokens))
        else:
            self._note_ended(job, answer_tokens)

    def _note_began(self, job: SimJob) -> None:
        book, uncached, sent = self._placements[job.index]
        book.began(job, uncached, self._clock.now_s)
        if sent is not None and self.directory is not None:
            self.directory.settle(sent)
        if self._listener is not None:
            self._listener.began(job)
        self._note(book)

    def _note_ended(self, job: SimJob, answer_tokens: int) -> None:
        book = self._placements.pop(job.index).book
        book.ended(job, answer_tokens)
        self._note(book)

    def _note(self, book: Book) -> None:
        number = self._numbers[book.name]
        book.set_reuse(0.0 if self._replicas[number].has_room else 1.0)
        self._changed.add(number)
        if self._listener is not None:
            self._listener.changed()

    def _candidates(self, request: RouteRequest, warm: Sequence[Warm]) -> list[Candidate]:
        books = self._books
        shortlist = self._shortlist
        if shortlist is None:
            candidates = [book.cold_candidate() for book in books]
            for bits, cached in warm:
                for number in replica_numbers(bits, len(books)).tolist():
                    candidates[number] = candidates[number]._replace(cached=cached)
            return candidates
        for number in sorted(self._changed):
            shortlist.note(number, books[number].standing())
        self._changed.clear()
        holders = [Holders(replica_numbers(bits, len(books)), cached) for bits, cached in warm]
        listed = shortlist.likely(request, holders, self._random)
        candidates = []
        for number in listed:
            book = books[number]
            for bits, cached in warm:
                if bits >> number & 1:
                    standing = book.standing()
                    candidates.append(Candidate(book.name, self._cost, standing, cached))
                    break
            else:
                candidates.append(book.cold_candidate())
        return candidates


def replica_numbers(bits: int, most: int) -> NDArray[np.intp]:
    """The places of the bits that are set, in order."""
    if bits.bit_count() <= 4:
        places = []
        while bits:
            lowest = bits & -bits
            places.append(lowest.bit_length() - 1)
            bits ^= lowest
        return np.array(places, np.intp)
    packed = np.frombuffer(bits.to_bytes((most + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little", count=most))
