"""What runs at one rate show, and what they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from loadtest.plan import TenantPlan
from loadtest.rate_point import Finding, RatePoint, Verdict, judge
from loadtest.record import ClientHealth, Outcome, Record, Run
from policies.slo import Slo
from tests.loadtest.knee import PROMISED, STALLED
from tests.loadtest.some_records import answer, failure, run_of

KEPT, BROKEN = answer(100.0, 10.0, tenant="acme"), answer(900.0, 10.0, tenant="acme")


def spaced(records: Sequence[Record]) -> list[Record]:
    """One a second, so that there is nothing like a queue."""
    return [
        replace(
            one,
            index=at,
            due_s=one.due_s + at,
            sent_s=one.sent_s + at,
            ended_s=one.ended_s + at,
            first_s=None if one.first_s is None else one.first_s + at,
            last_s=None if one.last_s is None else one.last_s + at,
        )
        for at, one in enumerate(records)
    ]


def run(
    records: Sequence[Record],
    *complaints: str,
    tenants: Sequence[TenantPlan] = (),
    late_s: float = 0.031,
) -> Run:
    """A run of these, with a client that complains or does not."""
    health = ClientHealth(0, 0, late_s if complaints else 0, 0, 0, 1, complaints)
    return run_of(spaced(records), tuple(tenants) or PROMISED, wall_s=len(records), client=health)


def judged(*runs: Run, confidence: float = 0.95) -> Finding:
    """At most 1 % of errors."""
    return judge(runs, confidence=confidence, most_errors=0.01)


def test_it_holds_or_fails_only_with_the_whole_interval() -> None:
    assert judged(run([KEPT] * 99 + [BROKEN])).verdict is Verdict.UNDECIDED  # 94.6–99.8
    assert judged(run([KEPT] * 199 + [BROKEN])).verdict is Verdict.HOLDS  # 97.2–99.9
    assert judged(run([KEPT, BROKEN] * 20)).verdict is Verdict.FAILS


def test_repetitions_are_pooled() -> None:
    one = run([KEPT] * 99 + [BROKEN])
    finding = judged(one, one, one)

    assert finding.verdict is Verdict.HOLDS
    assert finding.why == "99.0 %, 97.1–99.7, of 300 requests"


def test_requests_that_are_late_together_count_as_fewer() -> None:
    scattered = ([KEPT] * 9 + [BROKEN]) * 20
    together = [KEPT] * 120 + [BROKEN] * 20 + [KEPT] * 60
    [alone], [crowd] = judged(run(scattered)).attainments, judged(run(together)).attainments

    assert alone.share == crowd.share == 0.9
    assert alone.design_effect == 1.0
    # All that failed are in one of ten stretches of 20: 9 · 2² + 18² over 9 against 20 · 0.09.
    # Student's t of 9 degrees is 2.262, and would be 1.960 of ever so many.
    effect = (9 * 2**2 + 18**2) / 9 / 1.8 * (2.262 / 1.960) ** 2
    assert crowd.design_effect == pytest.approx(effect, rel=1e-3)
    assert crowd.low < alone.low < 0.9 < alone.high < crowd.high
    assert judged(run(scattered)).verdict is Verdict.FAILS
    assert judged(run(together)).verdict is Verdict.UNDECIDED


def test_intervals_cover_the_share_of_a_server_that_is_slow_in_spells() -> None:
    random, covered, naive, trials = np.random.default_rng(5), 0, 0, 200
    for _ in range(trials):
        # Spells of five requests on average, one in ten of them slow.
        kept, now = [], True
        for _ in range(300):
            now = bool(random.random() < 0.9) if random.random() < 0.2 else now
            kept.append(KEPT if now else BROKEN)
        [found] = judged(run_of(kept, PROMISED)).attainments
        covered += found.low <= 0.9 <= found.high
        naive += abs(found.share - 0.9) <= 1.96 * (0.09 / 300) ** 0.5

    assert naive / trials < 0.75
    assert covered / trials > 0.9


def queued(rate: float, seed: int) -> Run:
    """A minute of Poisson arrivals at one server that takes 80 ms for each."""
    draw, at_s, free_s, records = Random(seed), 0.0, 0.0, list[Record]()
    while (at_s := at_s + draw.expovariate(rate)) < 60:
        begins_s = max(at_s, free_s)
        free_s = begins_s + 0.08
        wait_ms = (begins_s - at_s) * 1e3
        records.append(answer(wait_ms + 80, sent_s=at_s, tenant="acme"))
    return run_of(records, PROMISED, wall_s=60)


def test_a_queue_that_was_lucky_for_once_is_not_said_to_hold() -> None:
    # In the long run 90 % have their first token within 500 ms at 10 per second, not 95 %.
    runs = [queued(10.0, seed) for seed in range(40)]
    shares = [judged(each).attainments[0].share for each in runs]

    assert 0.88 < sum(shares) / len(shares) < 0.94
    assert sum(share > 0.97 for share in shares) >= 4
    assert sum(judged(each).verdict is Verdict.HOLDS for each in runs) <= 2
    assert judged(queued(3.0, 0)).verdict is Verdict.HOLDS


def test_it_is_said_that_requests_wait_for_each_other() -> None:
    slow = answer(399.0, 10.0, tenant="acme")
    finding = judged(run(([KEPT] * 40 + [slow] * 10) * 2))

    assert finding.verdict is Verdict.UNDECIDED
    assert finding.attainments[0].share == 1.0
    assert ": as they wait for each other, they say as much as " in finding.why


def test_slower_answers_that_are_far_below_the_promise_say_nothing() -> None:
    quick, less_quick = answer(5.0, 1.0, tenant="acme"), answer(90.0, 2.0, tenant="acme")
    [found] = judged(run(([quick] * 40 + [less_quick] * 10) * 2)).attainments

    assert found.design_effect == 1.0


def test_the_requests_it_takes_are_those_that_decide_when_all_are_kept() -> None:
    [found] = judged(run([KEPT] * 10)).attainments

    assert found.needed == 73
    assert judged(run([KEPT] * 73)).verdict is Verdict.HOLDS
    few = judged(run([KEPT] * 72))
    assert few.verdict is Verdict.UNDECIDED
    assert few.why.endswith("of 72 requests: it takes 73 requests to show 95 %")


def test_every_tenant_has_to_be_served_as_it_was_promised() -> None:
    tenants = (
        *PROMISED,
        TenantPlan("modest", slo=Slo(ttft_s=2.0, target=0.5)),
        TenantPlan("free"),
    )
    modest = [replace(BROKEN, tenant="modest")] * 100
    free = [replace(BROKEN, tenant="free")] * 100

    both = judged(run([KEPT] * 200 + modest + free, tenants=tenants))
    assert both.verdict is Verdict.HOLDS
    assert [one.tenant for one in both.attainments] == ["acme", "modest"]
    one = judged(run([BROKEN] * 200 + modest, tenants=tenants))
    assert one.verdict is Verdict.FAILS
    assert one.why.startswith("acme: 0.0 %, ")
    # Of whom nothing was sent nothing is known.
    assert judged(run([KEPT] * 200, tenants=tenants)).verdict is Verdict.UNDECIDED


def test_too_many_errors_fail_a_rate_whatever_was_promised() -> None:
    refused = failure(Outcome.OVERLOADED, tenant="acme")
    modest = (TenantPlan("acme", slo=Slo(ttft_s=0.5, target=0.5)),)

    found = judged(run([KEPT] * 190 + [refused] * 10, tenants=modest))
    assert found.verdict is Verdict.FAILS
    assert found.why == "5.0 % of the requests failed, most as overloaded"
    # Two in 150 may still be less than 1 % in truth.
    few = judged(run([KEPT] * 148 + [refused] * 2, tenants=modest))
    assert (few.verdict, few.why) == (Verdict.UNDECIDED, "1.3 % of the requests failed")
    assert judged(run([KEPT] * 299 + [refused], tenants=modest)).verdict is Verdict.HOLDS


def test_a_run_that_the_client_complains_of_is_not_held_against_the_server() -> None:
    late = run([BROKEN] * 200, STALLED)
    good = run([KEPT] * 200)

    assert judged(late) == judged(late)._replace(verdict=Verdict.CLIENT, why=STALLED)
    both = judged(late, good)
    assert both.verdict is Verdict.HOLDS
    assert [one.requests for one in both.attainments] == [200]
    point = RatePoint.of(3.0, (late, good), both)
    assert (point.runs, point.figures.requests, point.complaints) == (2, 200, (STALLED,))


def test_a_complaint_that_can_change_nothing_is_no_reason_to_doubt() -> None:
    kept, broken = [KEPT] * 200, [BROKEN] * 200

    # 25 ms are 5 % of the 500 that were promised.
    assert judged(run(kept, STALLED, late_s=0.024)).verdict is Verdict.HOLDS
    assert judged(run(broken, STALLED, late_s=0.024)).verdict is Verdict.FAILS
    assert judged(run(kept, STALLED, late_s=0.026)).verdict is Verdict.CLIENT
    lost = [*kept, failure(Outcome.UNREACHABLE, tenant="acme")]
    assert judged(run(lost, STALLED, late_s=0.024)).verdict is Verdict.CLIENT
    free = [TenantPlan("acme", slo=Slo(tpot_s=0.1))]
    assert judged(run(kept, STALLED, late_s=0.0, tenants=free)).verdict is Verdict.CLIENT


def test_what_the_server_said_itself_counts_whatever_the_client_was_up_to() -> None:
    refused = failure(Outcome.OVERLOADED, tenant="acme")
    lost = failure(Outcome.TIMED_OUT, tenant="acme")

    assert judged(run([KEPT] * 100 + [refused] * 20, STALLED)).verdict is Verdict.FAILS
    assert judged(run([KEPT] * 100 + [lost] * 20, STALLED)).verdict is Verdict.CLIENT


def test_a_growing_backlog_fails_a_rate_that_still_keeps_its_promises() -> None:
    # Each answer begins at once, but ends ever later.
    records = [
        replace(one, ended_s=one.sent_s + 0.1 + at / 2)
        for at, one in enumerate(spaced([KEPT] * 200))
    ]
    found = judged(run_of(records, PROMISED))

    assert found.verdict is Verdict.FAILS
    assert found.why == "the server does not keep up: ever more is unanswered"


def test_what_no_run_can_show_is_refused() -> None:
    def promised(target: float) -> Sequence[TenantPlan]:
        return [TenantPlan("acme", slo=Slo(ttft_s=1.0, target=target))]

    with pytest.raises(ValueError, match="acme: no number of requests can show a target of 100 %"):
        judged(run([KEPT], tenants=promised(1.0)))
    with pytest.raises(ValueError, match="no tenant has"):
        judged(run([KEPT], tenants=[TenantPlan("acme")]))
    assert judged(run([], tenants=promised(0.9))).verdict is Verdict.UNDECIDED
