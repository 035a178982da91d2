"""What a request changes in its logits before a token is chosen: biases, bans and penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling_params import SamplingParams


class LogitEdits:
    """The tokens of one sequence whose logits change, with what each change is made of.

    A function of the parameters, the prompt and the generated tokens so far: building it again from
    those gives the same edits, and `append` keeps it current in constant time. One slot per
    distinct token: its bias, how often it was generated, and whether the repetition penalty
    applies (it has been seen, in the prompt or since).
    """

    __slots__ = (
        "_bias_extremes",
        "_biases",
        "_counts",
        "_penalizes",
        "_seen",
        "_slots",
        "_token_ids",
        "params",
    )

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], generated: Iterable[int]
    ) -> None:
        self.params = params
        penalizes_prompt = params.repetition_penalty != 1.0
        self._penalizes = (
            penalizes_prompt or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        self._slots: dict[int, int] = {}
        self._token_ids: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._biases: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self._counts: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self._seen: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._bias_extremes = (
            (min(params.logit_bias), max(params.logit_bias)) if params.logit_bias else ()
        )
        for token_id, bias in params.logit_bias.items():
            slot = self._slot(token_id)
            self._biases[slot] = bias
        if penalizes_prompt:
            for token_id in dict.fromkeys(prompt_token_ids):
                slot = self._slot(int(token_id))
                self._seen[slot] = True
        for token_id in generated:
            self.append(token_id)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters change any logit."""
        return (
            bool(params.logit_bias)
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
            or params.repetition_penalty != 1.0
        )

    def unknown_bias(self, vocab: int) -> int | None:
        """A token id of logit_bias that a vocabulary of this size does not have, if any."""
        return next((i for i in self._bias_extremes if not 0 <= i < vocab), None)

    def append(self, token_id: int) -> None:
        """Count one more generated token."""
        if self._penalizes:
            slot = self._slot(token_id)
            self._counts[slot] += 1.0
            self._seen[slot] = True

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens whose logits change, int64 [m]; a view, valid until `append`."""
        return self._token_ids[: len(self._slots)]

    @property
    def biases(self) -> NDArray[np.float32]:
        """What is added to each of them, float32 [m]; -inf is a ban."""
        return self._biases[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of them was generated, float32 [m]."""
        return self._counts[: len(self._slots)]

    @property
    def repetition_factors(self) -> NDArray[np.float32]:
        """The repetition penalty where it applies, else 1: float32 [m]."""
        factor = np.float32(self.params.repetition_penalty)
        return np.where(self._seen[: len(self._slots)], factor, np.float32(1.0))

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._token_ids):
            room = max(64, slot)
            self._token_ids = np.pad(self._token_ids, (0, room))
            self._biases = np.pad(self._biases, (0, room))
            self._counts = np.pad(self._counts, (0, room))
            self._seen = np.pad(self._seen, (0, room))
        self._token_ids[slot] = token_id
        return slot


def apply_edits(logits: torch.Tensor, rows: Sequence[int], edits: Sequence[LogitEdits]) -> None:
    """Change logits float32 [R, vocab] in place: edits[i] at row rows[i], no row twice.

    Biases first, then the repetition penalty (a positive logit is divided by it, another one
    multiplied: Keskar et al., "CTRL", 2019), then the frequency and presence penalties (OpenAI API
    reference, "Frequency and presence penalties").
    """
    device = logits.device
    sizes = [len(edit.token_ids) for edit in edits]

    def per_token(values: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float32), sizes)).to(device)

    def joined(arrays: Sequence[NDArray[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    row_index = torch.from_numpy(np.repeat(np.asarray(rows, dtype=np.int64), sizes)).to(device)
    token_index = torch.from_numpy(np.concatenate([edit.token_ids for edit in edits])).to(device)
    counts = joined([edit.counts for edit in edits])
    factors = joined([edit.repetition_factors for edit in edits])
    values = logits[row_index, token_index] + joined([edit.biases for edit in edits])
    values = torch.where(values > 0, values / factors, values * factors)
    values -= per_token([edit.params.frequency_penalty for edit in edits]) * counts
    values -= per_token([edit.params.presence_penalty for edit in edits]) * (counts > 0)
    logits[row_index, token_index] = values
