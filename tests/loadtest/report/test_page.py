"""The whole page: well-formed, complete, self-contained, and safe from what names say."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from loadtest.columns import ColumnRecords, Columns
from loadtest.comparison import Attempt, Comparison
from loadtest.find_max import FoundMax
from loadtest.metrics import METRICS
from loadtest.plan import TenantPlan
from loadtest.rate_point import RatePoint, judge
from loadtest.record import Outcome, Record, Run
from loadtest.report.page import render, write_report
from policies.slo import Slo
from tests.loadtest.report.made_runs import ACME, answer, failure, queue, run_of

NASTY = "<script>alert(1)</script>\"&' http://evil.example/x.js"
OWN_NAMESPACES = ("http://www.w3.org/2000/svg",)
VOID = {"meta", "br", "hr", "wbr"}


class Page(HTMLParser):
    """Reads a page and keeps what is asked for; fails at a tag that closes nothing."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.words.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def headings(page: Page) -> list[str]:
    return page.words.get("h2", []) + page.words.get("h3", [])


def found_max() -> tuple[FoundMax, list[Run]]:
    runs = [queue(rate, 240, seed=3) for rate in (0.25, 1.0, 1.9)]
    points = tuple(
        RatePoint.of(rate, [run], judge([run], confidence=0.95, most_errors=0.01))
        for rate, run in zip((0.25, 1.0, 1.9), runs, strict=True)
    )
    return FoundMax((ACME,), 0.05, 3, points, cut_short=False), runs


def compared() -> Comparison:
    """Three rounds in which the second's TTFT p95 is twice the first's, and nothing else is
    known but output that is as good as the same."""
    attempts = [
        Attempt(
            name,
            number,
            place,
            number,
            {**dict.fromkeys(METRICS), "TTFT p95": ttft_ms + number, "output": 50.0 + number % 2},
        )
        for number in (1, 2, 3)
        for place, (name, ttft_ms) in enumerate((("one", 100.0), (NASTY, 200.0)), 1)
    ]
    return Comparison.of(("one", NASTY), attempts, seed=0, headline="TTFT p95")


def test_one_run_has_every_part() -> None:
    page = Page(render([queue(1.2, 150)], title="Shared prompts"))
    assert page.words["h1"] == ["Shared prompts"]
    assert headings(page) == [
        "Key figures",
        "Details",
        "What the figures are",
        "Beware",
        "What was run",
        "How long answers took",
        "How it went",
        "What the cache gave",
        "Tenants and their promises",
        "Outcomes",
    ]
    text = " ".join(word for words in page.words.values() for word in words)
    for fact in ("forebay loadtest run --rate 4", "CPU: one, 2 cores", "shared system prompts"):
        assert fact in text
    assert "2026-03-01 14:05:09 UTC" in text


def test_every_chart_says_what_it_shows() -> None:
    page = Page(render([queue(1.2, 150)], title="t"))
    charts = [each for each in page.all("svg") if each.get("role") == "img"]
    assert len(charts) == 11
    assert all(each["aria-label"] for each in charts)
    assert len(page.words["title"]) == len(charts) + 1  # The page's own.
    assert len(page.words["desc"]) == len(charts)


def test_nothing_is_fetched() -> None:
    found, runs = found_max()
    html = render(runs, title="t", found=found)
    page = Page(html)
    for tag, attributes in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "base", "use", "image"}
        assert not {"src", "srcset", "action", "background"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert "http://" not in html
    assert "https://" not in html
    assert not re.search(r"url\(|@import", html)


def test_links_lead_somewhere() -> None:
    found, runs = found_max()
    page = Page(render(runs, title="t", found=found))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [str(each["href"]) for each in page.all("a")]
    assert len(links) == 3
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_names_are_text() -> None:
    tenant = TenantPlan(NASTY, slo=Slo(ttft_s=0.5))
    records = [
        *(answer(n, n / 4, tenant=NASTY, label=NASTY + str(n % 2)) for n in range(20)),
        replace(failure(20, 5.0, Outcome.BROKEN, NASTY), tenant=NASTY),
    ]
    run = replace(
        run_of(records, (tenant,), name=NASTY),
        target=NASTY,
        workload=NASTY,
        command=NASTY,
        began_at=NASTY,
        settings={NASTY: NASTY},
        machine=(NASTY,),
        notes=(NASTY,),
    )
    html = render([run, run], title=NASTY)
    assert "<script>alert" not in html
    page = Page(html)
    assert len(page.all("script")) == 1
    assert NASTY in page.words["h1"]
    assert NASTY in page.words["code"]
    labels = [str(each.get("aria-label")) for each in page.all("svg")]
    assert any(NASTY in label for label in labels)


def test_a_search_shows_the_rate_it_found() -> None:
    found, runs = found_max()
    page = Page(render(runs, title="t", found=found))
    assert "Against the rate" in headings(page)
    assert page.words["strong"][0] == f"{found.lines()[0]}."
    assert len(page.all("details")) == 3
    alone = Page(render([], title="t", found=found))
    assert headings(alone) == ["Against the rate", "What the figures are"]


def test_a_search_that_measured_nothing_says_so() -> None:
    page = Page(render([], title="t", found=FoundMax((ACME,), 0.05, 3, (), cut_short=True)))
    assert page.words["strong"][0] == "Nothing was measured."


def test_a_comparison_shows_ratios_and_what_is_noise() -> None:
    comparison = compared()
    runs = [queue(0.5, 20), queue(1.5, 20, name=NASTY)] * 2
    page = Page(render(runs, title="t", comparison=comparison))
    assert "Beside each other" in headings(page)
    assert "Against the rate" not in headings(page)
    assert page.words["strong"][0] == f"{comparison.lines()[0]}."
    assert any("✗ worse" in word for word in page.words["text"])
    assert any("noise" in word for word in page.words["text"])


def test_runs_at_several_rates_are_a_sweep_with_its_knee() -> None:
    runs = [run_of([answer(n, n / 4, ttft_s=1.0) for n in range(40)]), queue(0.1, 40, seed=1)]
    page = Page(render(runs, title="t"))
    assert "Against the rate" in headings(page)
    marks = {word.split("\u00a0")[0] for word in page.words["text"]}
    assert {"missed at 4.00/s"} <= marks
    assert any(mark.startswith("kept at 0.1") for mark in marks)
    first, second = page.words["a"]
    assert float(first.split()[-1].removesuffix("/s")) < float(
        second.split()[-1].removesuffix("/s")
    )


@pytest.mark.parametrize(
    "records",
    [
        [],
        [failure(0, 0.0, Outcome.UNREACHABLE)],
        [answer(0, 0.0)],
        [answer(0, 0.0, output_tokens=1)],
        [answer(n, 0.0) for n in range(5)],
        [answer(0, 1.0), failure(1, 2.0, Outcome.TIMED_OUT), answer(2, 900.0, ttft_s=100.0)],
    ],
    ids=["none", "all failed", "one", "one token", "all at once", "far apart"],
)
def test_runs_that_have_little_to_show(records: list[Record]) -> None:
    for tenants in ((ACME,), ()):
        page = Page(render([run_of(records, tenants)], title="t"))
        assert "What was run" in headings(page)
    several = Page(render([run_of(records), run_of(records), run_of([])], title="t"))
    assert len(several.all("details")) == 3


def test_no_figure_is_nan() -> None:
    records = [answer(0, 1.0), failure(1, 2.0, Outcome.TIMED_OUT), answer(2, 900.0)]
    html = render([run_of(records)], title="t")
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"<script>.*|<style>.*?</style>", "", html))


def test_many_requests_make_no_large_file() -> None:
    few = queue(1.9, 200)
    columns = Columns.of(few.records).take(np.tile(np.arange(200), 50))
    html = render([replace(few, records=ColumnRecords(columns))], title="t")
    assert len(html) < 130_000


def test_of_many_runs_only_some_have_all_their_charts() -> None:
    page = Page(render([queue(1.2, 12)] * 15, title="t"))
    assert len(page.all("details")) == 15
    charts = [each for each in page.all("svg") if each.get("role") == "img"]
    assert len(charts) == 3 + 12 * 11


def test_the_file_is_the_page(tmp_path: Path) -> None:
    runs = [run_of([answer(0, 0.0)])]
    write_report(tmp_path / "report.html", runs, title="t")
    assert (tmp_path / "report.html").read_text("utf-8") == render(runs, title="t")


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(ValueError, match="a run, a search or a comparison"):
        render([], title="t")
