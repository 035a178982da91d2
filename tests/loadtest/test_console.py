"""What a reader at a terminal sees of a run."""

from __future__ import annotations

from loadtest.console import blocks_of, lines_of, markdown_of
from loadtest.plan import TenantPlan
from loadtest.record import ClientHealth, Outcome, Record, Run, Tiers
from loadtest.summary import summarize
from policies.slo import Slo
from tests.loadtest.some_records import answer, failure, run_of

SOUND = ClientHealth(0.001, 0.0025, 0.0, 0.004, 0.25, 1200)
TENANTS = (TenantPlan("a", slo=Slo(ttft_s=0.2, tpot_s=0.1)), TenantPlan("b"))


def shown(run: Run) -> str:
    return "\n".join(lines_of(run, summarize(run)))


def cells(text: str, name: str) -> list[str]:
    """The cells of the first row that begins so, behind that."""
    line = next(line for line in text.split("\n") if line.startswith(name))
    return [cell.strip() for cell in line.removeprefix(name).split("  ") if cell.strip()]


def test_latencies_have_a_row_each_with_mean_and_percentiles() -> None:
    text = shown(run_of([answer(100, 10)] * 9 + [answer(3000, 10)]))

    assert cells(text, "whole answers, ms") == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert cells(text, "time to first token") == ["390", "100", "390", "1,695", "2,739", "3,000"]
    assert cells(text, "time per output token") == ["10.0"] * 6
    assert cells(text, "inter-token time") == ["–"] * 6
    assert cells(text, "time to publish")[1] == "100"
    assert "all 10 requests answered whole and as asked" in text


def test_throughput_goodput_and_cost_are_told_in_their_units() -> None:
    records = [answer(150, 50, price_nusd=50_000)] * 3 + [answer(250, 50, price_nusd=50_000)] * 7
    tenants = (TenantPlan(slo=Slo(ttft_s=0.2)),)

    text = shown(run_of(records, tenants, usd_per_hour=2.0))

    assert cells(text, "output tokens per second") == ["110"]
    assert cells(text, "requests per minute") == ["600"]
    assert cells(text, "goodput, requests per second") == ["3.00"]
    assert cells(text, "promises kept (95 % interval)") == ["30.0 % (10.8–60.3)"]
    assert cells(text, "charged, USD per request") == ["0.0000500"]
    assert cells(text, "machine, USD per million output tokens") == ["5.05"]


def test_what_is_not_known_has_no_row() -> None:
    text = shown(run_of([answer(100)]))

    for absent in ("USD", "promises kept", "Tenants", "By kind", "Why", "The client itself"):
        assert absent not in text
    assert "the server does not say what came from its cache" in text


def test_tenants_are_shown_with_their_promise_the_least_kept_first() -> None:
    records = [answer(9000, tenant="b"), answer(150, 50, tenant="a"), failure(tenant="a")]

    text = shown(run_of(records, TENANTS))

    assert cells(text, "a ") == [
        "TTFT ≤ 200, TPOT ≤ 100 for 95 %", "2", "1.00", "50.0 % (9.5–90.5)",
        "150", "150", "50.0", "50.0",
    ]  # fmt: skip
    assert cells(text, "b ") == ["–", "1", "1.00", "–", "9,000", "9,000", "0.00", "0.00"]
    assert text.index("\na ") < text.index("\nb ")


def test_a_thousand_tenants_do_not_fill_the_terminal() -> None:
    records = [answer(100, tenant=f"t{each}", label=f"l{each}") for each in range(25)]

    text = shown(run_of(records))

    assert "t19 " in text
    assert "t20 " not in text
    assert text.count("and 5 others") == 2


def test_labels_are_shown_with_what_was_cached() -> None:
    records = [
        answer(300, 10, label="cold", cached_tokens=0),
        answer(30, 10, label="hit", cached_tokens=90),
    ]

    text = shown(run_of(records))

    assert cells(text, "cold") == ["1", "0.0 %", "300", "300", "10.0", "10.0"]
    assert cells(text, "hit") == ["1", "90.0 %", "30.0", "30.0", "10.0", "10.0"]


def test_outcomes_and_the_commonest_reasons_are_shown() -> None:
    records: list[Record] = [answer(100), *(failure(reason="503: busy") for _ in range(3))]
    records += [failure(Outcome.LIMITED, reason=f"429: number {each}") for each in range(6)]

    text = shown(run_of(records))

    assert "1 of 10 requests answered whole; all took 1.00 s" in text
    assert cells(text, "overloaded") == ["3", "30.0 %"]
    assert cells(text, "limited") == ["6", "60.0 %"]
    assert "3 × 503: busy\n1 × 429: number 0\n" in text
    assert "number 4" not in text
    assert "and 2 other reasons" in text


def test_the_cache_is_told_by_tier() -> None:
    text = shown(run_of([answer(100, cached_tokens=80, tiers=Tiers(50, 20, 10))]))

    assert cells(text, "anywhere") == ["80.0 %"]
    assert cells(text, "device") == ["50.0 %"]
    assert cells(text, "Redis") == ["10.0 %"]


def test_a_sound_client_says_so_and_an_unfit_one_has_the_last_word() -> None:
    sound = shown(run_of([answer(100)], client=SOUND))
    unfit = SOUND._replace(complaints=("its event loop was late by 80 ms",))

    assert "used 25.0 % of one core, 1,200 requests open at most" in sound
    assert cells(sound, "event loop") == ["1.00", "2.50"]
    assert sound.endswith("it kept up: what was measured is the server")
    last = lines_of(run := run_of([answer(100)], client=unfit), summarize(run))[-1]
    assert last == "DO NOT TRUST: its event loop was late by 80 ms"


def test_pieces_of_several_tokens_are_pointed_out() -> None:
    coarse = shown(run_of([answer(100, 10, gaps_s=(0.1,))]))
    fine = shown(run_of([answer(100, 10, gaps_s=(0.01,) * 10)]))

    assert "between pieces of 5.50 tokens on average" in coarse
    assert "between pieces" not in fine


def test_a_simulated_run_says_that_it_is_none() -> None:
    assert "simulated, not measured" in shown(run_of([answer(1)], kind="simulated"))


def test_a_run_of_nothing_is_shown() -> None:
    text = shown(run_of([], wall_s=0.0))

    assert "0 of 0 requests" in text
    assert "nothing was sent" in text


def test_text_from_elsewhere_cannot_command_the_terminal_or_the_document() -> None:
    evil = "\x1b[2Jx|<b>\n# " + "y" * 500
    run = run_of([failure(reason=evil, tenant=evil), answer(1)])

    text, document = shown(run), markdown_of(run, summarize(run))

    assert "\x1b" not in text + document
    assert "[2Jx|<b> # yyy" in text
    assert max(map(len, text.split("\n"))) < 300
    assert "\\[2Jx\\|\\<b\\> \\# yyy" in document


def test_markdown_has_the_same_blocks_as_tables() -> None:
    run = run_of([answer(100, 10, tenant="a"), failure(tenant="b")], TENANTS, client=SOUND)
    summary = summarize(run)

    document = markdown_of(run, summary)

    assert document.startswith("## ours: W1: 32 prompts\n\n- measured: forebay at 127.0.0.1\n")
    for block in blocks_of(run, summary)[1:]:
        assert f"\n### {block.title}\n" in document
    assert "| time to first token | 100 |" in document
    assert document.endswith("\n")
    assert "\n\n\n" not in document


def test_a_run_without_a_whole_answer_has_no_figures_of_answers() -> None:
    text = shown(run_of([failure(), failure(label="other")]))

    assert "Outcomes" in text
    for absent in ("Latency", "Throughput", "By kind", "cache"):
        assert absent not in text
