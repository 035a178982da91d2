"""Records and runs for tests: whole answers with known times, and anything at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from loadtest.plan import TenantPlan
from loadtest.record import Outcome, Record, Run, Tiers


def answer(
    ttft_ms: float,
    tpot_ms: float | None = None,
    *,
    output_tokens: int = 11,
    sent_s: float = 0.0,
    **fields: Any,
) -> Record:
    """A whole answer of 11 tokens to a prompt of 100."""
    first_s = sent_s + ttft_ms / 1e3
    last_s = first_s + (tpot_ms or 0.0) / 1e3 * (output_tokens - 1)
    known: dict[str, Any] = {
        "index": 0,
        "due_s": sent_s,
        "prompt_tokens": 100,
        "ended_s": last_s,
        "publish_s": first_s,
    }
    return Record(
        **known | fields,
        sent_s=sent_s,
        outcome=Outcome.OK,
        output_tokens=output_tokens,
        first_s=first_s,
        last_s=last_s,
    )


def failure(outcome: Outcome = Outcome.OVERLOADED, **fields: Any) -> Record:
    """A request that got no answer."""
    return Record(0, 0.0, 0.0, 0.1, outcome, **fields)


def run_of(
    records: Sequence[Record],
    tenants: tuple[TenantPlan, ...] = (TenantPlan(),),
    *,
    wall_s: float = 1.0,
    **fields: Any,
) -> Run:
    """A run of these records, within one second."""
    known: dict[str, Any] = {
        "name": "ours",
        "kind": "live",
        "target": "forebay at 127.0.0.1",
        "workload": "W1: 32 prompts",
        "command": "forebay loadtest run",
        "began_at": "2026-01-02T03:04:05+00:00",
    }
    return Run(**known | fields, wall_s=wall_s, records=records, tenants=tenants)


_TIMES = st.floats(0, 1e3)
_COUNTS = st.integers(0, 1 << 40)

ANY_RECORD = st.builds(
    Record,
    index=_COUNTS,
    due_s=_TIMES,
    sent_s=_TIMES,
    ended_s=_TIMES,
    outcome=st.sampled_from(Outcome),
    prompt_tokens=st.integers(0, 1 << 20),
    output_tokens=st.integers(0, 9),
    first_s=st.none() | _TIMES,
    last_s=st.none() | _TIMES,
    publish_s=st.none() | _TIMES,
    cached_tokens=st.none() | _COUNTS,
    tiers=st.none() | st.builds(Tiers, _COUNTS, _COUNTS, _COUNTS),
    tenant=st.sampled_from(["a", "b", "c"]),
    label=st.sampled_from(["cold", "hit"]),
    reason=st.none() | st.sampled_from(["503: busy", ""]),
    gaps_s=st.lists(_TIMES, max_size=4).map(tuple),
    price_nusd=st.none() | _COUNTS,
    replica=st.sampled_from(["", "r0"]),
    stall_s=_TIMES,
)
