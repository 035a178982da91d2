"""Sending a session: its turns one after the other, each when it is due, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from xxhash import xxh3_128_digest

from loadtest.live import verdict
from loadtest.live.pool import Pool
from loadtest.live.progress import Tally
from loadtest.live.stream import StreamReader, Usage
from loadtest.live.verdict import Verdict
from loadtest.live.wording import Wording
from loadtest.plan import Message, Session, Turn
from loadtest.record import Outcome, Record
from loadtest.wire.connection import Answer, Connection, ExchangeError, OutOfSocketsError

AHEAD_S = 0.2
"""So long before it is due a request is written out and its connection opened."""


OnAnswer = Callable[[int, StreamReader], None]
"""Gets the index of each request that ended and what was read of its answer, on the event loop:
what it takes delays the client."""


class Sender:
    """Sends sessions to one target, and keeps the record of every request that ended.

    Times are taken on the clock of `time.perf_counter`; records count theirs from `began_s`.
    """

    def __init__(
        self,
        wording: Wording,
        pool: Pool,
        timeout_s: float,
        *,
        check_repeats: bool = False,
        on_answer: OnAnswer | None = None,
    ) -> None:
        """With `check_repeats`, equal greedy requests have to get equal texts."""
        self.began_s = time.perf_counter()
        self.records: list[Record] = []
        self.tally = Tally()
        self._wording = wording
        self._pool = pool
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._texts: dict[bytes, bytes] | None = {} if check_repeats else None

    async def converse(self, session: Session, index: int, due_s: float) -> float:
        """Send the turns; the first is due at `due_s` and has the index `index`. A turn that is not
        answered as asked ends the session: what follows would be another conversation. Returns when
        the last answer ended."""
        chat: list[Message] = []
        for place, turn in enumerate(session.turns):
            if place:
                due_s += turn.think_s
            chat += turn.messages
            sending = _Sending(session.tenant, turn, index + place, due_s)
            ok, text, due_s = await self._ask(sending, chat)
            if not ok:
                self.tally.unsent += len(session.turns) - place - 1
                break
            chat.append({"role": "assistant", "content": text})
        return due_s

    async def _ask(self, sending: _Sending, chat: list[Message]) -> tuple[bool, str, float]:
        """One turn: whether it was answered as asked, the answer's text, and when it ended."""
        await until(sending.due_s - AHEAD_S)
        body = self._wording.body(sending.turn, chat)
        request = self._wording.request(sending.tenant, sending.turn, body)
        read, answer = StreamReader(), None
        with self._pool.connection() as connection:
            try:
                await self._await_turn(connection, sending)
                with self.tally.in_flight():
                    answer = await connection.exchange(request, self._timeout_s, read.take)
            except ExchangeError as error:
                ended_s, judged = time.perf_counter(), verdict.of_error(error)
                self.tally.refused_sockets += isinstance(error, OutOfSocketsError)
            else:
                ended_s, judged = answer.ended_at_s, verdict.of_answer(answer, read, sending.turn)
                self.tally.vague += not verdict.says_when(answer)
        if judged.ok:
            judged = self._held_against_others(sending.turn, body, read)
        self._note(sending, judged, read, answer, ended_s)
        if self._on_answer is not None:
            self._on_answer(sending.index, read)
        return judged.ok, read.text, ended_s

    async def _await_turn(self, connection: Connection, sending: _Sending) -> None:
        """Until the request is due, with its connection open. Raises ExchangeError if that cannot
        be had in time.

        A handshake that takes until after the request was due is the server's, and counts as part
        of the answer; one that fails before is tried again when it is due.
        """
        sending.sent_s = asked_s = time.perf_counter()
        try:
            await connection.open(self._timeout_s)
        except ExchangeError:
            if time.perf_counter() >= sending.due_s:
                raise
        if time.perf_counter() >= sending.due_s:
            sending.sent_s = max(sending.due_s, asked_s)
        else:
            await until(sending.due_s)
            sending.sent_s = time.perf_counter()

    def _held_against_others(self, turn: Turn, body: bytes, read: StreamReader) -> Verdict:
        """Of a good answer, whether it says the same as the one to an equal request before."""
        if self._texts is not None and turn.fields.get("temperature", 0) == 0:
            text = xxh3_128_digest(read.text.encode())
            if self._texts.setdefault(xxh3_128_digest(body), text) != text:
                return Verdict(Outcome.WRONG, "the text differs from that of an equal request")
        return Verdict(Outcome.OK)

    def _note(
        self,
        sending: _Sending,
        judged: Verdict,
        read: StreamReader,
        answer: Answer | None,
        ended_s: float,
    ) -> None:
        usage = read.usage or Usage(prompt_tokens=len(sending.turn.tokens or ()))
        self.tally.ended += 1
        self.tally.failed += not judged.ok
        self.tally.output_tokens += usage.completion_tokens
        self.records.append(
            Record(
                index=sending.index,
                due_s=sending.due_s - self.began_s,
                sent_s=sending.sent_s - self.began_s,
                ended_s=ended_s - self.began_s,
                outcome=judged.outcome,
                prompt_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                first_s=self._since(read.first_s),
                last_s=self._since(read.last_s),
                publish_s=self._since(read.publish_s),
                cached_tokens=usage.cached_tokens,
                tiers=usage.tiers,
                tenant=sending.tenant,
                label=sending.turn.label,
                reason=None if judged.reason is None else self._wording.without_keys(judged.reason),
                gaps_s=read.gaps_s(),
                price_nusd=_nusd(usage.cost_usd),
                replica="" if answer is None else answer.headers.get("x-forebay-replica", ""),
            )
        )

    def _since(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self.began_s


class _Sending:
    """One request on its way: whose, what, which, when it was to be sent and when it was."""

    __slots__ = ("due_s", "index", "sent_s", "tenant", "turn")

    def __init__(self, tenant: str, turn: Turn, index: int, due_s: float) -> None:
        self.tenant = tenant
        self.turn = turn
        self.index = index
        self.due_s = due_s
        self.sent_s = due_s


async def until(at_s: float) -> None:
    """Sleep until a time on the clock of `time.perf_counter`; not at all if it has passed."""
    delay_s = at_s - time.perf_counter()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


def _nusd(cost_usd: str | None) -> int | None:
    """Billionths of a US dollar of an exact decimal; None for none, and for what is no number."""
    try:
        return None if cost_usd is None else int(Decimal(cost_usd) * 1_000_000_000)
    except (InvalidOperation, OverflowError, ValueError):
        return None
