"""Verdicts for runs of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.columns import Columns
from loadtest.record import Outcome, Record, Run, Sample, Tiers
from loadtest.report.promises import promise_bars
from loadtest.report.words import Tone, Verdict, verdict
from loadtest.summary import summarize
from tests.loadtest.report.made_runs import ACME, BATCH, FREE, answer, failure, run_of


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def of(run: Run) -> Verdict:
    found = verdict(run, summarize(run), Columns.of(run.records))
    return Verdict(found.tone, plain(found.headline), tuple(map(plain, found.sentences)))


def kept_and_late(kept: int, late: int, tenant: str = "acme") -> list[Record]:
    return [
        answer(n, n / 4, ttft_s=0.1 if n < kept else 9.0, tenant=tenant) for n in range(kept + late)
    ]


@pytest.mark.parametrize(
    ("kept", "late", "tone", "words"),
    [
        (400, 0, Tone.GOOD, "100 % of 400 requests kept their promise (target 95 %)."),
        (300, 100, Tone.BAD, "75.0 % of 400 requests kept their promise (target 95 %)."),
        (96, 4, Tone.UNSURE, "96.0 % of 100 requests kept their promise (target 95 %): too close to"
         " call, the true share is within 90.2–98.4 %."),
        (94, 6, Tone.UNSURE, "94.0 % of 100 requests kept their promise (target 95 %): too close to"
         " call, the true share is within 87.5–97.2 %."),
    ],
)  # fmt: skip
def test_a_promise_is_kept_broken_or_too_close_to_call(
    kept: int, late: int, tone: Tone, words: str
) -> None:
    found = of(run_of(kept_and_late(kept, late)))
    assert (found.tone, found.headline) == (tone, words)


def test_tenants_that_missed_their_target_are_named_the_worst_first() -> None:
    other = replace(ACME, name="other")
    records = [*kept_and_late(10, 90), *kept_and_late(40, 60, "other"), *kept_and_late(99, 1, "b")]
    run = run_of(records, (other, ACME, replace(BATCH, name="b"), FREE))
    found = of(run)
    assert found.tone is Tone.BAD
    assert found.headline == (
        "1 of 3 tenants reached their targets. Missed: acme 10.0 % (target 95 %); "
        "other 40.0 % (target 95 %)."
    )
    assert [bar.label for bar in promise_bars(run, summarize(run))] == ["other", "acme", "b"]


def test_requests_without_a_promise_are_not_among_those_that_kept_it() -> None:
    records = [*kept_and_late(400, 0), *kept_and_late(50, 50, "free")]
    found = of(run_of(records, (ACME, FREE)))
    assert found.headline == "100 % of 400 requests kept their promise (target 95 %)."


def test_tenants_that_are_close_are_named() -> None:
    records = [*kept_and_late(96, 4), *kept_and_late(400, 0, "batch")]
    found = of(run_of(records, (ACME, BATCH)))
    assert found.tone is Tone.UNSURE
    assert found.headline == (
        "99.2 % of 500 requests kept their promise, and each of 2 tenants reached its target; too "
        "close to call for acme."
    )


def test_without_a_promise_there_is_no_verdict() -> None:
    records = [answer(0, 0.0, tenant="free"), failure(1, 0.0, Outcome.OVERLOADED)]
    found = of(run_of(records, (FREE,)))
    assert found.tone is Tone.PLAIN
    assert found.headline == (
        "1 of 2 requests (50.0 %) were answered as asked; nothing was promised of their times."
    )


def test_nothing_sent_and_nothing_answered() -> None:
    assert of(run_of([])).headline == "Nothing was sent."
    found = of(run_of([failure(0, 0.0, Outcome.UNREACHABLE)]))
    assert (found.tone, found.headline) == (Tone.BAD, "None of 1 request was answered.")


def test_the_sentences_say_why() -> None:
    records = [answer(n, float(n), tiers=Tiers(10, 25, 0)) for n in range(20)]
    timeline = tuple(Sample(float(n), running=1.0, waiting=float(n % 4)) for n in range(20))
    run = replace(run_of(records), timeline=timeline, wall_s=20.0, usd_per_hour=2.0)
    assert of(run).sentences == (
        "The first token came after 100 ms at p50 and 100 ms at p95 (promised: 500 ms); each one "
        "after it took 20.0 ms at p50 and 20.0 ms at p95 (promised: 120 ms).",
        "The server gave 1.00 answers and 11.0 output tokens a second; 1.00 answers a second were "
        "in time (goodput).",
        "1.50 requests waited for the server on average, 3 at most.",
        "35.0 % of the prompt tokens came from the cache: 10.0 % from the device, 25.0 % from "
        "DRAM.",
        "A million output tokens cost $50.51 of a machine at $2.00 an hour.",
    )


def test_a_server_that_falls_behind_is_told() -> None:
    records = [answer(n, n / 10, ttft_s=0.1 + n / 20) for n in range(300)]
    assert (
        "What was unanswered grew until sending ended: this rate is more than the server can do."
        in of(run_of(records)).sentences
    )


def test_a_cache_that_gave_nothing_and_one_that_tells_nothing() -> None:
    cold = of(run_of([answer(0, 0.0, tiers=Tiers())]))
    assert "No prompt token came from the cache." in cold.sentences
    silent = of(run_of([answer(0, 0.0)]))
    assert not any("cache" in sentence for sentence in silent.sentences)
