"""How several contenders stand to the first, metric by metric, and what is noise."""

from __future__ import annotations

from loadtest.comparison import Comparison
from loadtest.difference import Difference, Judgement
from loadtest.metrics import METRICS
from loadtest.report.blocks import charts, section, table
from loadtest.report.charts.forest import Ratio, forest
from loadtest.report.markup import Html
from loadtest.report.words import Tone, Verdict

_COLOURS = {
    Judgement.BETTER: "c-good",
    Judgement.WORSE: "c-bad",
    Judgement.NONE: "c-quiet",
    Judgement.UNKNOWN: "c-quiet",
}
_WORDS = {
    Judgement.BETTER: "✓ better",
    Judgement.WORSE: "✗ worse",
    Judgement.NONE: "noise",
    Judgement.UNKNOWN: "unknown",
}


def comparison_verdict(comparison: Comparison) -> Verdict:
    """The headline metric's sentence, and what else differs."""
    main = [each for each in comparison.differences if each.metric == comparison.headline]
    told = [each for each in main if each.judgement in (Judgement.BETTER, Judgement.WORSE)]
    tone = Tone.PLAIN if told else Tone.UNSURE
    open_ = [
        each
        for each in comparison.differences
        if each.metric != comparison.headline
        and each.judgement not in (Judgement.BETTER, Judgement.WORSE)
    ]
    first, *others = comparison.lines()
    in_table = set(map(str, open_))
    sentences = [f"{line}." for line in others if line not in in_table]
    if open_:
        names = dict.fromkeys(each.metric for each in open_)
        sentences.insert(-1, f"No difference was shown in {', '.join(names)}; see the table below.")
    return Verdict(tone, f"{first}.", tuple(sentences))


def comparison_section(comparison: Comparison) -> Html:
    """A plot of ratios for each contender but the first, and the table of all figures."""
    first, *others = comparison.contenders
    plots = [plot for other in others if (plot := _plot(comparison, other, first)) is not None]
    return section(
        "Beside each other",
        *([charts(*plots)] if plots else []),
        table(comparison.table(), f"Medians of {comparison.rounds} rounds, and ratios"),
        key="comparison",
        intro=f"Every round runs {', '.join(comparison.contenders)} with the same requests. A line "
        "is where the true ratio lies with 95 %: where it crosses 1×, there may be no difference.",
    )


def _plot(comparison: Comparison, contender: str, first: str) -> Html | None:
    ratios = [
        Ratio(
            f"{each.metric} ({_better(each.metric)} is better)",
            each.estimate.value,
            each.estimate.low,
            each.estimate.high,
            _WORDS[each.judgement],
            _COLOURS[each.judgement],
        )
        for each in comparison.differences
        if each.contender == contender
        if each.scale == "ratio"
        if each.estimate is not None
        if each.estimate.value > 0
    ]
    if not ratios:
        return None
    return forest(
        f"{contender} beside {first}",
        f"how many times {first}'s figure {contender} has",
        " ".join(map(_spoken, (d for d in comparison.differences if d.contender == contender))),
        ratios,
    )


def _better(metric: str) -> str:
    return "more" if METRICS[metric].higher_is_better else "less"


def _spoken(each: Difference) -> str:
    return f"{each}."
