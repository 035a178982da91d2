"""Log-probabilities as the API reports them: of the raw logits, whatever the sampler does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.errors import LogitsNotFinite
from engine.request import TokenLogprobs
from engine.sampling.candidates import at_least, rank_floors
from engine.sampling.grid_softmax import row_chunks, weight_totals
from engine.sampling.torch_threads import one_torch_thread


class RawLogprobs:
    """Log-softmax of some rows, and each row's most likely tokens, read before a token is chosen.

    logits float32 [n, vocab], contiguous, to be left as they are until `chosen`; maxima float32
    [n], finite; `tops[i]` is how many alternatives row i reports, where equal logits rank by lower
    token id and tokens without any probability are left out.
    """

    __slots__ = ("_logits", "_normalizers", "_tops")

    def __init__(self, logits: torch.Tensor, maxima: torch.Tensor, tops: Sequence[int]) -> None:
        totals = weight_totals(logits, maxima, torch.ones_like(maxima))
        self._logits = logits
        self._normalizers = maxima.double() + totals.log()
        self._tops = _most_likely(logits, self._normalizers, tops)

    def chosen(self, token_ids: torch.Tensor) -> list[TokenLogprobs]:
        """The report for one token per row, int64 [n]."""
        values = self._logits.gather(1, token_ids.unsqueeze(1)).view(-1).double()
        logprobs = (values - self._normalizers).tolist()
        return [
            TokenLogprobs(token_id, logprob, top)
            for token_id, logprob, top in zip(token_ids.tolist(), logprobs, self._tops, strict=True)
        ]


def prompt_logprobs(
    logits: torch.Tensor, target_ids: torch.Tensor, top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of known tokens: row i of logits predicts target_ids[i].

    logits float32 [n, vocab], unchanged; target_ids int64 [n]; `top` alternatives beside each.
    Raises LogitsNotFinite for the first row whose greatest logit is not a finite number.
    """
    reports: list[TokenLogprobs] = []
    with torch.inference_mode(), one_torch_thread():
        logits = logits.contiguous()
        targets = target_ids.to(device=logits.device, dtype=torch.int64)
        for chunk in row_chunks(logits.shape[0], logits.shape[1], logits.device):
            rows = logits[chunk]
            maxima = rows.amax(dim=1)
            finite = maxima.isfinite()
            if not bool(finite.all()):
                row = chunk.start + finite.tolist().index(False)
                raise LogitsNotFinite(row)
            reports += RawLogprobs(rows, maxima, [top] * rows.shape[0]).chosen(targets[chunk])
    return reports


def _most_likely(
    logits: torch.Tensor, normalizers: torch.Tensor, tops: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    most = max(tops)
    if most == 0:
        return [()] * len(tops)
    candidates = at_least(logits, rank_floors(logits, [max(top, 1) for top in tops]))
    values, order = candidates.logits.sort(dim=1, descending=True, stable=True)
    ids = candidates.token_ids.gather(1, order[:, :most]).tolist()
    best = (values[:, :most].double() - normalizers.unsqueeze(1)).tolist()
    return [
        tuple(
            (token_id, logprob)
            for token_id, logprob in zip(row_ids[:top], row_best[:top], strict=True)
            if logprob > -torch.inf
        )
        for row_ids, row_best, top in zip(ids, best, tops, strict=True)
    ]
