"""Who was answered as promised."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.columns import Columns
from loadtest.plan import TenantPlan
from loadtest.record import Record
from loadtest.stats.goodput import Goodput
from loadtest.stats.interval import wilson
from policies.slo import Slo
from tests.loadtest.some_records import ANY_RECORD, answer, failure

PROMPT = TenantPlan("a", slo=Slo(ttft_s=0.2, tpot_s=0.1))


def test_a_refused_request_is_a_broken_promise() -> None:
    records = [answer(150, 50, tenant="a"), failure(tenant="a")]

    found = Goodput.of(Columns.of(records), [PROMPT])

    assert (found.kept, found.attainment, found.interval) == (1, 0.5, wilson(1, 2))


def test_who_was_promised_nothing_counts_whole_answers_and_attains_nothing() -> None:
    records = [answer(9000, 900, tenant="b"), failure(tenant="b"), answer(9000, tenant="unknown")]

    assert Goodput.of(Columns.of(records), [PROMPT, TenantPlan("b")]) == (2, None, None)
    assert Goodput.of(Columns.of([]), [PROMPT]) == (0, None, None)


def test_attainment_is_of_those_with_a_promise_only() -> None:
    records = [answer(150, 50, tenant="a"), answer(250, 50, tenant="a"), answer(9000, tenant="b")]

    found = Goodput.of(Columns.of(records), [PROMPT, TenantPlan("b")])

    assert (found.kept, found.attainment) == (2, 0.5)


_LIMITS = st.sampled_from([None, 0.0, 0.3, 500.0])


@settings(max_examples=40, deadline=None)
@given(st.lists(ANY_RECORD, max_size=8), st.lists(st.builds(Slo, _LIMITS, _LIMITS), min_size=3))
def test_it_counts_as_the_records_themselves_would(records: list[Record], slos: list[Slo]) -> None:
    promised = dict(zip("abc", slos, strict=False))
    tenants = [TenantPlan(name, slo=slo) for name, slo in promised.items()]
    found = Goodput.of(Columns.of(records), tenants)

    def kept(record: Record) -> bool:
        slo = promised[record.tenant]
        return record.kept(slo) if slo.promises else record.ok

    promises = [kept(record) for record in records if promised[record.tenant].promises]
    assert found.kept == sum(map(kept, records))
    if promises:
        assert found.attainment == pytest.approx(sum(promises) / len(promises))
    else:
        assert found.attainment is None
