"""The page: everything of one or several runs in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from loadtest.comparison import Comparison
from loadtest.find_max import FoundMax
from loadtest.record import Run
from loadtest.report.blocks import section
from loadtest.report.cautions import warnings
from loadtest.report.labels import Shown, is_sweep, shown
from loadtest.report.markup import Html, element, raw
from loadtest.report.quantities import counted, moment
from loadtest.report.sections.cache import cache_tiers
from loadtest.report.sections.comparison import comparison_section, comparison_verdict
from loadtest.report.sections.failures import failures
from loadtest.report.sections.glossary import glossary
from loadtest.report.sections.latency import distributions, overlays
from loadtest.report.sections.overview import key_figures, runs_table, verdict_box
from loadtest.report.sections.setting import setting
from loadtest.report.sections.sweep import found_section, found_verdict, sweep_section
from loadtest.report.sections.tenants import tenants
from loadtest.report.sections.timeline import timelines
from loadtest.report.words import Tone, Verdict, verdict

_MOST_FACTS = 2
_MOST_NAMED = 3
_MOST_DETAILED = 12
"""Runs with all their charts; more would make the file larger than anyone reads."""


def render(
    runs: Sequence[Run],
    *,
    title: str,
    found: FoundMax | None = None,
    comparison: Comparison | None = None,
) -> str:
    """The whole page as HTML. `found` is the search that made the runs, `comparison` what was found
    between them; either may come without any run. Raises ValueError if there is nothing at all."""
    if not runs and found is None and comparison is None:
        raise ValueError("a report needs a run, a search or a comparison")
    all_runs = shown(runs, repeated=comparison is not None)
    body = [
        _heading(title, all_runs),
        *(_several(all_runs, found, comparison) if len(runs) != 1 else []),
        *(_one(all_runs[0], found, comparison) if len(runs) == 1 else []),
        glossary(),
    ]
    return "<!doctype html>\n" + element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("title", title),
            element("style", _own("page.css")),
        ),
        element("body", element("main", *body), element("script", _own("page.js"))),
        lang="en",
    )


def write_report(
    path: Path,
    runs: Sequence[Run],
    *,
    title: str,
    found: FoundMax | None = None,
    comparison: Comparison | None = None,
) -> None:
    """Write the page to a file. Raises OSError if that fails, ValueError as `render` does."""
    path.write_text(render(runs, title=title, found=found, comparison=comparison), "utf-8")


def _one(only: Shown, found: FoundMax | None, comparison: Comparison | None) -> list[Html]:
    came = verdict(only.run, only.summary, only.columns)
    return [
        verdict_box(came, warnings(only.run, only.summary)),
        *_findings(found, comparison),
        section("Key figures", key_figures(only), key="figures"),
        section("Details", *_details(only), key=only.key),
    ]


def _several(
    runs: Sequence[Shown], found: FoundMax | None, comparison: Comparison | None
) -> list[Html]:
    parts = []
    if found is None and comparison is None:
        parts.append(verdict_box(_best(runs), _all_warnings(runs)))
    parts += _findings(found, comparison)
    if found is None and comparison is None and is_sweep(runs):
        parts.append(sweep_section(runs))
    if runs:
        left_out = None
        if len(runs) > _MOST_DETAILED:
            left_out = f"Only the first {_MOST_DETAILED} have all their charts."
        parts.append(section("Runs", runs_table(runs), overlays(runs), key="runs"))
        parts.append(section("Each run", *_each(runs), key="each", intro=left_out))
    return parts


def _findings(found: FoundMax | None, comparison: Comparison | None) -> list[Html]:
    parts = []
    if found is not None:
        parts += [verdict_box(found_verdict(found), ()), found_section(found)]
    if comparison is not None:
        parts += [verdict_box(comparison_verdict(comparison), ()), comparison_section(comparison)]
    return parts


def _each(runs: Sequence[Shown]) -> list[Html]:
    parts = []
    for number, each in enumerate(runs):
        came = verdict(each.run, each.summary, each.columns)
        content = [verdict_box(came, warnings(each.run, each.summary)), key_figures(each)]
        content += _details(each) if number < _MOST_DETAILED else [setting(each), failures(each)]
        heading = element("summary", element("strong", each.label), element("span", came.headline))
        parts.append(element("details", heading, *content, id=each.key))
    return parts


def _details(each: Shown) -> list[Html]:
    return [
        setting(each),
        distributions(each),
        timelines(each),
        cache_tiers(each),
        tenants(each),
        failures(each),
    ]


def _best(runs: Sequence[Shown]) -> Verdict:
    """What several runs come to that nobody compared: the one with the most goodput."""
    best = max(runs, key=lambda each: each.summary.whole.goodput_rps)
    came = verdict(best.run, best.summary, best.columns)
    return Verdict(
        Tone.PLAIN,
        f"{counted(len(runs), 'run')}; {best.label} had the most goodput.",
        (came.headline, *came.sentences),
    )


def _all_warnings(runs: Sequence[Shown]) -> list[str]:
    """Those of every run, each once, with the runs that it is about."""
    about: dict[str, list[str]] = {}
    for each in runs:
        for line in warnings(each.run, each.summary):
            about.setdefault(line, []).append(each.label)
    lines = []
    for line, labels in about.items():
        if len(labels) == len(runs):
            lines.append(line)
        elif len(labels) > _MOST_NAMED:
            lines.append(f"{len(labels)} of {len(runs)} runs: {line}")
        else:
            lines.append(f"{', '.join(labels)}: {line}")
    return lines


def _heading(title: str, runs: Sequence[Shown]) -> Html:
    """The title, and in a line what ran on what and when."""
    facts = [
        *_first_few([each.run.target for each in runs]),
        *_first_few([each.run.workload for each in runs]),
    ]
    about = [element("span", fact) for fact in facts]
    began = sorted({each.run.began_at for each in runs})
    if began:
        until = f" to {moment(began[-1])}" if len(began) > 1 else ""
        about.append(element("time", f"{moment(began[0])}{until}"))
    return element("header", element("h1", title), element("p", *about, class_="about"))


def _first_few(facts: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(facts))
    more = len(distinct) - _MOST_FACTS
    return [*distinct[:_MOST_FACTS], *([f"and {more} more"] if more > 0 else [])]


def _own(name: str) -> Html:
    return raw(files(__package__ or "loadtest.report").joinpath(name).read_text("utf-8"))
