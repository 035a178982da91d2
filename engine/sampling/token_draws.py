"""Drawing tokens: inverse CDF over a row's distribution, whole or cut to its likely part.

One uniform number picks one token: the first, in token id order, at which the running sum of
weights exceeds that share of the total. Sums are exact (see `grid_softmax`), so a draw over a cut
distribution needs only the tokens that are left, and no draw depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.candidates import at_least, descending, rank_floors
from engine.sampling.grid_softmax import grid_weights, row_chunks, weight_totals
from engine.sampling_params import SamplingParams

# How many tail tokens top_p is first assumed to have to tell apart. Language models' nuclei almost
# always fit; a row whose nucleus does not is drawn again with the whole vocabulary in view.
_LIKELY_TAIL_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows to draw from, each by its own numbers.

    logits float32 [n, vocab], contiguous, unchanged by a draw; maxima float32 [n], each row's
    greatest logit, finite; temperatures float32 [n], positive; uniforms float64 [n] in [0, 1).
    """

    logits: torch.Tensor
    maxima: torch.Tensor
    temperatures: torch.Tensor
    uniforms: torch.Tensor

    def take(self, rows: torch.Tensor) -> Draws:
        """The draws of the given rows, int64 [m], on their own."""
        return Draws(
            self.logits[rows], self.maxima[rows], self.temperatures[rows], self.uniforms[rows]
        )


def draw(draws: Draws) -> torch.Tensor:
    """One token per row from all of the vocabulary: int64 [n]."""
    logits = draws.logits
    vocab = logits.shape[1]
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for chunk in row_chunks(logits.shape[0], vocab, logits.device):
        weights = grid_weights(logits[chunk], draws.maxima[chunk], draws.temperatures[chunk], vocab)
        token_ids[chunk] = _invert(weights, draws.uniforms[chunk])
    return token_ids


def draw_filtered(draws: Draws, params: Sequence[SamplingParams]) -> torch.Tensor:
    """One token per row from what its top_k, then top_p, then min_p leave: int64 [n].

    Tokens rank by logit, equal ones by lower id. top_k keeps the first k; top_p the fewest of those
    that reach its share of their probability; min_p those at least that fraction as likely as the
    likeliest. The likeliest always stays.
    """
    filters = _Filters.of(draws, params)
    token_ids, enough = _draw_ranked(draws, filters, _LIKELY_TAIL_TOKENS)
    if not bool(enough.all()):
        short = enough.logical_not().nonzero().view(-1)
        vocab = draws.logits.shape[1]
        for chunk in row_chunks(len(short), vocab, draws.logits.device):
            rows = short[chunk]
            token_ids[rows], _ = _draw_ranked(draws.take(rows), filters.take(rows), vocab)
    return token_ids


@dataclass(frozen=True, slots=True)
class _Filters:
    """What cuts each row, as columns: every field [n].

    `top_k` int64, the size of the vocabulary where off. `top_p` and `min_p` float64. `totals`
    float64, the whole row's weight where top_p cuts it and top_k does not, else 0.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def of(cls, draws: Draws, params: Sequence[SamplingParams]) -> _Filters:
        vocab, device = draws.logits.shape[1], draws.logits.device
        ranks = [param.top_k if 0 < param.top_k < vocab else vocab for param in params]
        totals = torch.zeros(len(params), dtype=torch.float64, device=device)
        by_mass = [i for i, param in enumerate(params) if param.top_p < 1.0 and ranks[i] == vocab]
        if by_mass:
            index = torch.tensor(by_mass, device=device)
            totals[index] = weight_totals(
                take_rows(draws.logits, by_mass), draws.maxima[index], draws.temperatures[index]
            )
        return cls(
            top_k=torch.tensor(ranks, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
            totals=totals,
        )

    def take(self, rows: torch.Tensor) -> _Filters:
        return _Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.totals[rows])


def _draw_ranked(
    draws: Draws, filters: _Filters, tail_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as if no more than `tail_tokens` tokens mattered to the weight that top_p cuts off.

    Returns tokens int64 [n] and bool [n]: whether the row's candidates turned out to reach what
    top_p asks for, so that its token counts. With the whole vocabulary for a tail they always do.
    """
    vocab = draws.logits.shape[1]
    # Tokens lighter than (1 - top_p) * total / tail_tokens weigh less than 1 - top_p of the total
    # if they are at most `tail_tokens`, so the ranking reaches top_p before them. Half of that
    # leaves room for the rounding of weights. It is 0 where top_p is off or top_k cuts first.
    least_mass = (1.0 - filters.top_p) * filters.totals / (2 * tail_tokens)
    candidates = at_least(draws.logits, _floors(draws, filters, least_mass))
    ranked = descending(candidates.logits)
    weights = grid_weights(ranked, draws.maxima, draws.temperatures, vocab)
    sums = weights.cumsum(1)

    top_k = filters.top_k.clamp(max=ranked.shape[1]).unsqueeze(1)
    cut_by_rank = filters.top_k < vocab
    # The weight that top_p is a share of: all tokens', or the first k's when top_k cut first.
    totals = torch.where(cut_by_rank, sums.gather(1, top_k - 1).view(-1), filters.totals)
    mass = filters.top_p * totals
    enough = (least_mass <= filters.min_p) | (sums[:, -1] >= mass)
    mass.masked_fill_(filters.top_p >= 1.0, torch.inf)
    # Each filter keeps a first part of the ranking, so the shortest of the parts is what stays.
    kept = torch.searchsorted(sums, mass.unsqueeze(1)) + 1
    likely = (weights >= filters.min_p.unsqueeze(1)).sum(1, keepdim=True)
    kept = torch.minimum(torch.minimum(kept, top_k), likely).clamp_(min=1)

    threshold = ranked.gather(1, kept - 1)
    nucleus = at_least(candidates.logits, threshold.view(-1))
    # Several tokens may share the threshold; those with the lowest ids fill what room is left.
    above = (nucleus.logits > threshold).sum(1, keepdim=True)
    equal = nucleus.logits == threshold
    surplus = equal & (equal.cumsum(1) > kept - above)
    weights = grid_weights(nucleus.logits, draws.maxima, draws.temperatures, vocab)
    picked = _invert(weights.masked_fill_(surplus, 0.0), draws.uniforms)
    slots = nucleus.token_ids.gather(1, picked.unsqueeze(1))
    return candidates.token_ids.gather(1, slots).view(-1), enough


def take_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The given rows, ascending and distinct: the tensor itself if that is all, else a copy."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(rows, dtype=torch.int64, device=logits.device))


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First index at which the running sum exceeds uniform * total: float64 [n, m] to int64 [n]."""
    sums = weights.cumsum(1)
    totals = sums[:, -1]
    # The product may round up to the total, which no running sum exceeds.
    below = torch.nextafter(totals, torch.zeros_like(totals))
    targets = torch.minimum(uniforms * totals, below)
    return torch.searchsorted(sums, targets.unsqueeze(1), right=True).view(-1)


def _floors(draws: Draws, filters: _Filters, least_mass: torch.Tensor) -> torch.Tensor:
    """Logits below which a row's filters need no token, found cheaply and set low: float32 [n].

    Where top_k is on it alone decides: top_p takes its share of all that top_k keeps, whatever
    min_p removes afterwards.
    """
    maxima, temperatures = draws.maxima.double(), draws.temperatures.double()
    least = torch.maximum(least_mass, filters.min_p).clamp_(max=1.0)
    depth = least.log() * temperatures
    # Float32 rounds logits and quotients; the slack keeps a token that is just heavy enough.
    slack = 1e-5 * (temperatures - depth) + 1e-6 * maxima.abs()
    floors = (maxima + depth - slack).float()
    ranks = filters.top_k.tolist()
    vocab = draws.logits.shape[1]
    ranked = [i for i, rank in enumerate(ranks) if rank < vocab]
    if ranked:
        index = torch.tensor(ranked, device=floors.device)
        floors[index] = rank_floors(take_rows(draws.logits, ranked), [ranks[i] for i in ranked])
    return floors
