"""Routing decisions and replicas as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from cache.breaker import Breaker
from gateway.dispatch.member import Member, Routable
from gateway.dispatch.receipt import Receipt
from gateway.utilization_metrics import Utilization
from policies.routing import Candidate, Standing


def receipt_answer(receipt: Receipt) -> dict[str, Any]:
    """One decision: who could have taken the request, what each was predicted to take, who was
    chosen, and what came of it. Times are milliseconds."""
    return {
        "model": receipt.model,
        "policy": receipt.policy,
        "prompt_tokens": receipt.request.prompt_tokens,
        "chosen": receipt.candidate.name,
        "decision_us": round(receipt.decision_s * 1e6, 1),
        "candidates": [_candidate(receipt, candidate) for candidate in receipt.candidates],
        "passed_by": dict(receipt.passed_by),
        "moved_from": receipt.moved_from,
        "outcome": {
            "ttft_ms": _ms(receipt.ttft_s),
            "prediction_error_ms": _ms(receipt.error_s),
            "cached_tokens": receipt.served_tokens,
            "lost": receipt.lost,
        },
    }


def member_answer(
    model: str, member: Member[Routable], utilization: Mapping[str, Utilization | None]
) -> dict[str, Any]:
    """A replica's state, the work that is known to be there, what work takes there, and what share
    of its device that made use of in the last minute, by kind of step."""
    health = member.health()
    cost = member.replica.coefficients()
    return {
        "replica": member.name,
        "model": model,
        "kind": member.kind,
        "condition": health.condition.value,
        "reason": health.reason,
        "takes_requests": member.takes_requests(),
        "breaker": _breaker(member.breaker),
        "max_running": member.load.max_running,
        "own_load": _standing(member.load.own()),
        "load": _standing(member.load.standing()),
        "cost_us": {
            "step": round(cost.constant_s * 1e6, 2),
            "token": round(cost.token_s * 1e6, 3),
            "sequence": round(cost.sequence_s * 1e6, 3),
        },
        "coefficients": cost._asdict(),
        "utilization": {kind: _utilization(used) for kind, used in utilization.items()},
    }


def _utilization(used: Utilization | None) -> dict[str, float | None]:
    if used is None:
        return {"mfu": None, "mbu": None}
    return {"mfu": round(used.mfu, 4), "mbu": round(used.mbu, 4)}


def _candidate(receipt: Receipt, candidate: Candidate) -> dict[str, Any]:
    prediction = receipt.predict(candidate)
    return {
        "replica": candidate.name,
        "predicted_ttft_ms": _ms(prediction.ttft_s),
        "queue_ms": _ms(prediction.queue_s),
        "load_ms": _ms(prediction.load_s),
        "prefill_ms": _ms(prediction.prefill_s),
        "cached_tokens": candidate.cached._asdict(),
        "full": candidate.standing.full,
        **_standing(candidate.standing),
    }


def _standing(standing: Standing) -> dict[str, int]:
    return {
        "pending_tokens": standing.pending_tokens,
        "waiting": standing.waiting,
        "running": standing.running,
        "context_tokens": standing.context_tokens,
    }


def _breaker(breaker: Breaker) -> dict[str, Any]:
    return {
        "state": breaker.state.value,
        "opened": breaker.opened,
        "next_try_ms": _ms(breaker.wait_s(monotonic())),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
