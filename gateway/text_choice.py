"""From a choice's tokens to its text: detokenizing, stop strings, log-probabilities."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.detokenizer import Detokenizer
from engine.request import EngineOutput, TokenLogprobs
from engine.stop_strings import StopMatcher
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One shown token's log-probabilities; `offset` is where its text starts, in characters.

    `logprob` is None for a prompt's first token, which nothing predicts.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output adds to the answer. `finish_reason` is "stop" or "length" at the end, None
    before: the engine's STOP and LENGTH have the wire's own names, other ends never get here."""

    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: str | None = None


class TextChoice:
    """One choice's text as it grows. Feed it outputs in order until a delta has a finish reason.

    Text is held back while it could be the start of a stop string or is half a character, and
    entries with their text, so that joined deltas are exactly the whole answer. `generated` counts
    tokens up to the one that ended the choice: after a stop string, what the engine produced beyond
    it does not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: tuple[str, ...],
        wants_logprobs: bool,
        echoed: EchoedPrompt | None = None,
        shows_generated: bool = True,
    ) -> None:
        self.generated = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops) if stops else None
        self._wants_logprobs = wants_logprobs
        self._echoed = echoed
        self._shows_generated = shows_generated
        self._held: deque[tuple[TokenEntry, int]] = deque()  # with where the token's text ends
        base = len(echoed.text) if echoed is not None else 0
        self._decoded = base
        self._emitted = base

    def feed(self, output: EngineOutput) -> Delta:
        """The delta of one output that is no error."""
        echo = self._take_echo(output)
        if not self._shows_generated:
            return Delta(echo.text, echo.entries, "length")
        shown = output.token_ids[:-1] if output.stopped_by_token else output.token_ids
        if self._matcher is None and not self._wants_logprobs:
            text, matched = self._detokenizer.feed(shown), False
            self.generated += len(shown)
        else:
            text, matched = self._feed_singly(shown, output.logprobs)
        if matched:
            return self._end(echo, text, "stop", cut=True)
        if output.finish_reason is None:
            return self._delta(echo, text)
        self.generated += len(output.token_ids) - len(shown)
        rest, matched = self._flush()
        reason = "stop" if matched else output.finish_reason.value
        return self._end(echo, text + rest, reason, cut=matched)

    def _feed_singly(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[str, bool]:
        text = ""
        for i, token_id in enumerate(token_ids):
            start = self._decoded
            piece = self._detokenizer.feed((token_id,))
            self._decoded += len(piece)
            self.generated += 1
            if self._wants_logprobs:
                own = logprobs[i]
                entry = TokenEntry(token_id, own.logprob, own.top, start)
                self._held.append((entry, self._decoded))
            if self._matcher is None:
                text += piece
                continue
            emitted, matched = self._matcher.feed(piece)
            text += emitted
            if matched is not None:
                return text, True
        return text, False

    def _flush(self) -> tuple[str, bool]:
        """What was held back, and whether it turns out to hold a stop string after all."""
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return rest, False
        emitted, matched = self._matcher.feed(rest)
        if matched is None:
            emitted += self._matcher.flush()
        return emitted, self._matcher.matched is not None

    def _end(self, echo: Delta, text: str, reason: str, *, cut: bool) -> Delta:
        """The last delta: with `cut`, tokens that begin in the stop string are not shown."""
        end = self._emitted + len(text)
        entries = tuple(entry for entry, _ in self._held if not cut or entry.offset < end)
        return Delta(echo.text + text, echo.entries + entries, reason)

    def _delta(self, echo: Delta, text: str) -> Delta:
        self._emitted += len(text)
        entries = []
        while self._held and self._held[0][1] <= self._emitted:
            entries.append(self._held.popleft()[0])
        return Delta(echo.text + text, (*echo.entries, *entries))

    def _take_echo(self, output: EngineOutput) -> Delta:
        """The prompt itself, in front of the first delta."""
        echoed, self._echoed = self._echoed, None
        if echoed is None:
            return Delta("")
        return Delta(echoed.text, echoed.entries(output.prompt_logprobs or ()))


class EchoedPrompt:
    """A prompt to be shown before what it brings about, with log-probabilities if wanted."""

    def __init__(
        self, tokenizer: Tokenizer, token_ids: list[int], text: str | None, *, wants_logprobs: bool
    ) -> None:
        self.text = tokenizer.decode(token_ids) if text is None else text
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._wants_logprobs = wants_logprobs

    def entries(self, logprobs: tuple[TokenLogprobs, ...]) -> tuple[TokenEntry, ...]:
        """One entry per prompt token; `logprobs` starts at the second token."""
        if not self._wants_logprobs:
            return ()
        detokenizer = Detokenizer(self._tokenizer)
        lengths = [len(detokenizer.feed((token_id,))) for token_id in self._token_ids]
        # some tokenizers put a space before a text, which is none of the client's
        offset = len(self.text) - sum(lengths)
        entries: list[TokenEntry] = []
        for i, token_id in enumerate(self._token_ids):
            own = logprobs[i - 1] if i else None
            logprob, top = (own.logprob, own.top) if own is not None else (None, ())
            entries.append(TokenEntry(token_id, logprob, top, max(0, offset)))
            offset += lengths[i]
        return tuple(entries)
