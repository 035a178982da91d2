"""Choosing one token per sequence and step, for the whole batch at once.

Nothing is remembered between steps but what the tokens say: a draw is a function of (seed, choice,
position), an edit of the tokens so far. Rows only pay for what they ask for, and no row's outcome
depends, to the bit, on which others are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import BadLogits, LogitsNotFinite
from engine.request import TokenLogprobs
from engine.sampling.logit_edits import LogitEdits, apply_edits
from engine.sampling.logprobs import RawLogprobs
from engine.sampling.random_streams import stream_key, uniforms
from engine.sampling.token_draws import Draws, draw, draw_filtered, take_rows
from engine.sampling.torch_threads import one_torch_thread
from engine.sampling_params import SamplingParams

_SMALLEST_TEMPERATURE = float(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token; log-probabilities where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class SamplingRow:
    """What the sampler knows of one sequence, owned by the sequence for its whole life.

    `position` is the index, from the start of the prompt, of the token to be chosen next. Built
    again from the prompt and the tokens generated so far, a row chooses as the old one would have.
    Token ids are below the size of the vocabulary; a row whose logit_bias breaks that gets a
    BadLogits at every step.
    """

    __slots__ = ("edits", "filters", "params", "plain_greedy", "position", "stream")

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], generated: Iterable[int] = ()
    ) -> None:
        tokens = list(generated)
        self.params = params
        self.position = len(prompt_token_ids) + len(tokens)
        self.stream = stream_key(params.seed, params.choice_index)
        self.plain_greedy = params.plain_greedy
        self.filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.edits = (
            LogitEdits(params, prompt_token_ids, tokens) if LogitEdits.needed(params) else None
        )

    def append(self, token_id: int) -> None:
        """One more token was generated: the next draw is for the position after it."""
        self.position += 1
        if self.edits is not None:
            self.edits.append(token_id)


class Sampler:
    """Chooses tokens. Keeps no state; safe to share between engines."""

    def __init__(self, argmax: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """`argmax` maps float32 [R, vocab] to int64 [R]: the lowest index of the greatest value.

        It should point at a NaN in a row that holds one, as torch's and numpy's do.
        """
        self._argmax = argmax or _argmax

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> list[Sampled | BadLogits]:
        """One outcome per row of logits float32 [R, vocab], which may be modified.

        A row that no token can be chosen from (its greatest logit is not a finite number, all its
        tokens are banned, or its logit_bias names a token that does not exist) gets a BadLogits in
        its place; the others are not affected. Rows do not move on: `append` is the caller's.
        """
        if not rows:
            return []
        with torch.inference_mode(), one_torch_thread():
            logits = logits.contiguous()
            best = self._argmax(logits)
            peaks = logits.gather(1, best.unsqueeze(1)).view(-1)
            bad = _mute(logits, peaks, LogitsNotFinite)
            if not all(row.plain_greedy for row in rows):
                reports, banned = self._choose(logits, peaks, best, rows)
                bad = banned | bad
            else:
                reports = {}
            outcomes: list[Sampled | BadLogits] = [
                Sampled(token_id, reports.get(index))
                for index, token_id in enumerate(best.tolist())
            ]
        for index, error in bad.items():
            outcomes[index] = error
        return outcomes

    def _choose(
        self,
        logits: torch.Tensor,
        peaks: torch.Tensor,
        best: torch.Tensor,
        rows: Sequence[SamplingRow],
    ) -> tuple[dict[int, TokenLogprobs], dict[int, BadLogits]]:
        """Turn the most likely tokens in `best` into the chosen ones, where they may differ."""
        vocab = logits.shape[1]
        bad: dict[int, BadLogits] = {}
        edited: list[int] = []
        edits: list[LogitEdits] = []
        for i, row in enumerate(rows):
            if row.edits is None:
                continue
            unknown = row.edits.unknown_bias(vocab)
            if unknown is None:
                edited.append(i)
                edits.append(row.edits)
            else:
                bad[i] = BadLogits(i, f"logit_bias: token {unknown} is not below {vocab}")
        reported = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if reported:
            raw = take_rows(logits, reported)
            if raw is logits and edited:
                raw = logits.clone()
            tops = [rows[i].params.logprobs or 0 for i in reported]
            raw_logprobs = RawLogprobs(raw, _pick(peaks, reported), tops)
        if edited:
            apply_edits(logits, edited, edits)
            changed = take_rows(logits, edited)
            changed_best = self._argmax(changed)
            index = torch.tensor(edited, device=logits.device)
            best[index] = changed_best
            peaks[index] = changed.gather(1, changed_best.unsqueeze(1)).view(-1)
            bad |= _mute(logits, peaks, _no_token_left)
        for filtered in (False, True):
            drawn = [
                i for i, row in enumerate(rows) if not row.params.greedy and row.filters is filtered
            ]
            if drawn:
                index = torch.tensor(drawn, device=logits.device)
                params = [rows[i].params for i in drawn]
                draws = self._draws(logits, peaks, rows, drawn)
                best[index] = draw_filtered(draws, params) if filtered else draw(draws)
        if not reported:
            return {}, bad
        reports = raw_logprobs.chosen(_pick(best, reported))
        return dict(zip(reported, reports, strict=True)), bad

    @staticmethod
    def _draws(
        logits: torch.Tensor,
        peaks: torch.Tensor,
        rows: Sequence[SamplingRow],
        drawn: Sequence[int],
    ) -> Draws:
        device = logits.device
        temperatures = [max(rows[i].params.temperature, _SMALLEST_TEMPERATURE) for i in drawn]
        streams = np.array([rows[i].stream for i in drawn], dtype=np.uint64)
        positions = np.array([rows[i].position for i in drawn], dtype=np.uint64)
        return Draws(
            logits=take_rows(logits, drawn),
            maxima=_pick(peaks, drawn),
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
            uniforms=torch.from_numpy(uniforms(streams, positions)).to(device),
        )


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        # numpy's is vectorised on a CPU; torch's takes ten times as long.
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)


def _pick(values: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    return values[torch.tensor(indices, dtype=torch.int64, device=values.device)]


def _no_token_left(row: int) -> BadLogits:
    return BadLogits(row, "logit_bias leaves no token to choose")


def _mute(
    logits: torch.Tensor, peaks: torch.Tensor, error: Callable[[int], BadLogits]
) -> dict[int, BadLogits]:
    """Report rows whose peak is not finite, and zero them so that the rest can go on unharmed."""
    finite = peaks.isfinite()
    if bool(finite.all()):
        return {}
    bad = {i: error(i) for i, ok in enumerate(finite.tolist()) if not ok}
    for i in bad:
        logits[i] = 0.0
        peaks[i] = 0.0
    return bad
