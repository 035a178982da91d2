"""What a reader is warned of."""

from __future__ import annotations

from dataclasses import replace

from loadtest.record import ClientHealth, Outcome, Run
from loadtest.report.cautions import warnings
from loadtest.summary import summarize
from tests.loadtest.report.made_runs import answer, failure, run_of


def beware(run: Run) -> list[str]:
    return [line.replace("\u00a0", " ") for line in warnings(run, summarize(run))]


def test_what_to_beware_of() -> None:
    records = [
        *(answer(n, n / 4) for n in range(98)),
        failure(98, 25.0, Outcome.OVERLOADED),
        failure(99, 25.0, Outcome.OVERLOADED),
        failure(100, 25.0, Outcome.BROKEN),
    ]
    complaint = "sent up to 31 ms late"
    run = replace(
        run_of(records),
        client=ClientHealth(0.02, 0.03, 0.02, 0.031, 0.97, 50, (complaint,)),
        notes=("the server ran beside the client",),
    )
    assert beware(run) == [
        "Client: sent up to 31 ms late",
        "3 requests (3.0 %) failed: 2 overloaded (503, the server's capacity), 1 broken (begun and "
        "cut off). Latencies are of whole answers only.",
        "With 98 answers, fewer than 5 lie beyond p95: take p95 and p99 as a hint only.",
        "The server ran beside the client",
    ]


def test_enough_answers_of_a_fit_client_need_no_warning() -> None:
    assert beware(run_of([answer(n, n / 4) for n in range(500)])) == []
    nearly = beware(run_of([answer(n, n / 4) for n in range(499)]))
    assert nearly == ["With 499 answers, fewer than 5 lie beyond p99: take p99 as a hint only."]


def test_a_simulation_and_coarse_pieces_are_told() -> None:
    records = [replace(answer(n, n / 4), gaps_s=(0.1, 0.1)) for n in range(500)]
    first, second = beware(replace(run_of(records), kind="simulated"))
    assert first.startswith("Simulated:")
    assert second.startswith("The server sends 3.67 tokens at once on average")
