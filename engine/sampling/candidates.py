"""The few tokens of a row that can matter, found without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens of each row at or above its floor, in ascending id order, padded to one width.

    `token_ids` int64 [n, width]; `logits` float32 [n, width], -inf where there is only padding.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor


def at_least(logits: torch.Tensor, floors: torch.Tensor) -> Candidates:
    """Gather the tokens whose logit reaches the row's floor. Banned tokens (-inf) never do.

    logits float32 [n, vocab], floors float32 [n].
    """
    floors = floors.clamp(min=torch.finfo(torch.float32).min)
    if logits.device.type == "cpu":
        return _at_least_cpu(logits, floors)
    return _at_least_device(logits, floors)


def rank_floors(logits: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """A floor per row that at least its `rank` best tokens reach, and not many others.

    logits float32 [n, vocab], ranks positive; float32 [n]. The rank-th greatest of the maxima of
    disjoint blocks is such a floor: each of those blocks has a token that reaches it. Beyond as
    many ranks as there are blocks the floor is -inf.
    """
    rows, vocab = logits.shape
    whole = vocab - vocab % _BLOCK
    maxima = logits[:, :whole].view(rows, whole // _BLOCK, _BLOCK).amax(2)
    blocks = descending(torch.cat([maxima, logits[:, whole:]], dim=1))
    wanted = torch.tensor(ranks, device=logits.device)
    count = blocks.shape[1]
    floors = blocks.gather(1, wanted.clamp(max=count).sub_(1).unsqueeze(1)).view(rows)
    return floors.masked_fill_(wanted > count, -torch.inf)


def descending(values: torch.Tensor) -> torch.Tensor:
    """Each row of float32 [n, m] sorted from greatest to least."""
    if values.device.type == "cpu":
        # numpy sorts values alone, with vector instructions; torch.sort drags indices along.
        negated = -values.numpy()
        negated.sort(axis=1)
        return torch.from_numpy(np.negative(negated, out=negated))
    return values.sort(dim=1, descending=True).values


def _at_least_cpu(logits: torch.Tensor, floors: torch.Tensor) -> Candidates:
    # numpy scans rows several times faster than torch does on a CPU, and row by row each stays in
    # the core's cache.
    rows = logits.numpy()
    found = [np.flatnonzero(row >= floor) for row, floor in zip(rows, floors.numpy(), strict=True)]
    width = max(1, max(map(len, found)))
    token_ids = np.zeros((len(found), width), dtype=np.int64)
    values = np.full((len(found), width), -np.inf, dtype=np.float32)
    for i, ids in enumerate(found):
        token_ids[i, : len(ids)] = ids
        values[i, : len(ids)] = rows[i].take(ids)
    return Candidates(torch.from_numpy(token_ids), torch.from_numpy(values))


def _at_least_device(logits: torch.Tensor, floors: torch.Tensor) -> Candidates:
    rows, vocab = logits.shape
    device = logits.device
    reached = logits >= floors.unsqueeze(1)
    counts = reached.sum(1, keepdim=True)
    width = max(1, int(counts.max()))
    filled = torch.arange(width, device=device) < counts
    columns = torch.arange(vocab, device=device).expand(rows, vocab)
    token_ids = torch.zeros(rows, width, dtype=torch.int64, device=device)
    token_ids.masked_scatter_(filled, columns[reached])
    values = torch.full((rows, width), -torch.inf, device=device)
    values.masked_scatter_(filled, logits[reached])
    return Candidates(token_ids, values)
