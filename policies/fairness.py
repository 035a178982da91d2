"""Sharing a class between flows: virtual token counters.

After "Fairness in Serving Large Language Models" (Sheng et al., 2024) and start-time fair queueing
(Goyal et al., 1996). Each flow has a counter of what it was served, divided by its weight, and the
waiting flow with the least counter is next. So flows that always have something waiting are served
in proportion to their weights, whatever the lengths of their prompts and answers.

What is counted are units of work: one for each token that is computed (not for those found in the
cache) and one more for each that is generated. A generated token so costs two: it is computed as
well, in a step of its own whose constant, the reading of the weights, it shares with only the other
running sequences, where a prompt's tokens share it with hundreds. On two CPU cores, a step of 16
streams takes 1.8 to 2.4 times as long for each of its tokens as prefill does, depending on context.

A request pays when it begins for what it is expected to take, and the difference is settled as it
goes on and ends. Counters that moved only as tokens come out would let a flow take every slot that
is free at the moment before it had paid for the first.
"""

from __future__ import annotations

from dataclasses import dataclass

GENERATED_UNITS = 2
"""For a token that is generated, and computed by the next step."""
_ANSWER_TOKENS = 64.0
"""What an answer is expected to have before any was seen."""
_LEARN = 1 / 8
"""How much of the expectation the latest answer makes up."""


@dataclass(slots=True)
class _Account:
    """A flow's counter, in units divided by weight; and how long its answers are."""

    count: float
    answer_tokens: float | None = None


class TokenCounters:
    """The counters of one class's flows.

    `time` is the virtual time: the counter that the last flow had which began something. A flow
    that comes to wait starts from there at least, so that no credit is gathered while nothing is
    asked for. What of a flow is not above `time` says nothing more, and is forgotten when there are
    many; beyond `keep` flows with nothing waiting, those with the least debt are.
    """

    def __init__(self, keep: int = 1024) -> None:
        self.time = 0.0
        self._accounts: dict[bytes, _Account] = {}
        self._waiting: set[bytes] = set()
        self._answer_tokens = _ANSWER_TOKENS
        self._keep = keep
        self._clear_at = 2 * keep

    def __len__(self) -> int:
        """Flows that are remembered."""
        return len(self._accounts)

    def count(self, flow: bytes) -> float:
        """The flow's counter."""
        account = self._accounts.get(flow)
        return self.time if account is None else account.count

    def wait(self, flow: bytes) -> None:
        """The flow, which had nothing waiting, has now."""
        account = self._account(flow)
        account.count = max(account.count, self.time)
        self._waiting.add(flow)

    def wait_no_more(self, flow: bytes) -> None:
        """Nothing of the flow waits any longer."""
        self._waiting.discard(flow)
        if len(self._accounts) > self._clear_at:
            self._clear()

    def begin(self, flow: bytes) -> None:
        """Something of this flow is let in, in its turn."""
        self.time = max(self.time, self.count(flow))

    def charge(self, flow: bytes, units: float, weight: float) -> None:
        """So many units for the flow; negative ones are given back."""
        self._account(flow).count += units / weight

    def expected_answer_tokens(self, flow: bytes, max_tokens: int) -> float:
        """How long an answer will be: as the flow's last ones, or the class's."""
        account = self._accounts.get(flow)
        usual = account.answer_tokens if account is not None else None
        return min(max_tokens, self._answer_tokens if usual is None else usual)

    def learn_answer(self, flow: bytes, tokens: int) -> None:
        """An answer of the flow has ended after so many tokens."""
        self._answer_tokens += (tokens - self._answer_tokens) * _LEARN
        account = self._account(flow)
        if account.answer_tokens is None:
            account.answer_tokens = float(tokens)
        account.answer_tokens += (tokens - account.answer_tokens) * _LEARN

    def _account(self, flow: bytes) -> _Account:
        account = self._accounts.get(flow)
        if account is None:
            account = self._accounts[flow] = _Account(self.time)
        return account

    def _clear(self) -> None:
        idle = [
            (account.count, flow)
            for flow, account in self._accounts.items()
            if flow not in self._waiting
        ]
        idle.sort()
        for index, (count, flow) in enumerate(idle):
            if count > self.time and len(idle) - index <= self._keep:
                break
            del self._accounts[flow]
        self._clear_at = 2 * max(self._keep, len(self._accounts))
