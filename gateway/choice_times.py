"""When the tokens of a request's choices came, where it has several."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.choice import Choice


class ChoiceTimes:
    """Of one request. Its choices are seldom equally long, and where there is no room for all of
    them at once some begin when others are over: from the first token of all to the last is no time
    that belongs to any of them."""

    __slots__ = ("_last_s", "_next", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last_s: list[float] = []
        self._next = 0

    def note(self, choices: Sequence[Choice], made_s: float) -> None:
        """One of the choices has got tokens, the last of which was made then: the one that has more
        than before. They mostly come in the same order in each step, so that it is the next one."""
        if not self._tokens:
            self._tokens, self._last_s = [0] * len(choices), [0.0] * len(choices)
        for place in range(self._next - len(choices), self._next):
            tokens = choices[place].text.generated
            if tokens != self._tokens[place]:
                self._tokens[place], self._last_s[place] = tokens, made_s
                self._next = (place + 1) % len(choices)
                return

    def tpot_s(self, choices: Sequence[Choice]) -> float | None:
        """Between two tokens of one choice, on average over all such times; None without any."""
        spans_s, gaps = 0.0, 0
        for choice, tokens, last_s in zip(choices, self._tokens, self._last_s, strict=False):
            # one that was moved to another replica has begun at the first that gave it a token
            begun_s = [each.began_s for each in choice.receipts if each.began_s is not None]
            if begun_s and tokens > 1:
                spans_s += max(0.0, last_s - begun_s[0])
                gaps += tokens - 1
        return spans_s / gaps if gaps else None
