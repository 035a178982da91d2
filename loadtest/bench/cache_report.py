"""What the cache part found, as tables and lines."""

from __future__ import annotations

from loadtest.bench.cache import CacheFigures
from loadtest.bench.cache_ttft import PROMPT_TOKENS, WAYS, TtftFigure
from loadtest.tables import Table, number


def cache_tables(found: CacheFigures) -> list[Table]:
    """TTFT by tier, speed of movements, and all tiers on against off."""
    return [_ttft_table(found), _movement_table(found), _comparison_table(found)]


def cache_notes(found: CacheFigures) -> list[str]:
    """One line per thing that a reader of the figures has to know."""
    counted = sum(one.samples for one in found.ttft)
    differ = sum(one.texts_that_differ for one in found.ttft)
    lines = [f"TTFT by tier: {counted} answers, {differ} with another text than the cold one"]
    lines += [
        f"{one.way}, {one.prompt_tokens:,} tokens: {one.strays} of {one.strays + one.samples} "
        "answers came from elsewhere and are not counted"
        for one in found.ttft
        if one.strays
    ]
    failures = list(dict.fromkeys(found.failures))
    lines += [f"FAILED: {line}" for line in failures[:5]]
    return lines


def _ttft_table(found: CacheFigures) -> Table:
    figures = {(one.way, one.prompt_tokens): one for one in found.ttft}
    headers = ["TTFT p50 ms (of cold)", *(f"{tokens:,} tokens" for tokens in PROMPT_TOKENS)]
    rows = [
        (way, *(_ttft_cell(figures.get((way, tokens))) for tokens in PROMPT_TOKENS)) for way in WAYS
    ]
    return Table(tuple(headers), tuple(rows))


def _ttft_cell(figure: TtftFigure | None) -> str:
    if figure is None or figure.ttft_ms is None or figure.share_of_cold is None:
        return number(None)
    return f"{number(figure.ttft_ms)} ({figure.share_of_cold:.1%})"


def _movement_table(found: CacheFigures) -> Table:
    rows = [
        (one.name, f"{one.rate / 1e9:.2f}", f"{one.plain_rate / 1e9:.2f}", f"{one.share:.0%}")
        for one in found.movements
    ]
    return Table(("moving blocks", "GB/s", "memcpy or redis-py GB/s", "share"), tuple(rows))


def _comparison_table(found: CacheFigures) -> Table:
    rows = []
    for comparison in found.comparisons:
        for label, ratio in comparison.ratios.items():
            rows.append(
                (
                    f"{comparison.workload.name} {label}",
                    f"{ratio.ratio:.3f}",
                    f"{ratio.low:.3f}–{ratio.high:.3f}",
                    str(ratio.pairs),
                )
            )
    return Table(("all tiers on over lower tiers off", "ratio", "95 %", "pairs"), tuple(rows))
