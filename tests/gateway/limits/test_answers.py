"""What a client is told of limits."""

from __future__ import annotations

import pytest

from gateway.limits.answers import duration, limit_headers, refusal
from policies.limit_standing import AccountId, Ceiling, Obstacle, Standing
from policies.limits import Limits

ACME = AccountId("acme")
KEY = AccountId("acme", "key", "key-1")
MODEL = AccountId("acme", "model", "m")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.012, "12ms"),
        (0.0001, "1ms"),
        (0.9995, "1s"),
        (1, "1s"),
        (1.001, "2s"),
        (59.2, "1m0s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
        (90_061, "25h1m1s"),
    ],
)
def test_durations_as_openai_writes_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_account_with_least_left_is_told() -> None:
    ceilings = [
        Ceiling(ACME, Limits(rpm=100, tpm=1000)),
        Ceiling(KEY, Limits(rpm=5)),
        Ceiling(MODEL, Limits(tpm=300)),
    ]
    standings = [
        Standing(60, 990, 1, reset_s=61.0),
        Standing(1, 0, 1, reset_s=2.5),
        Standing(0, 0, 0),
    ]
    assert dict(limit_headers(ceilings, standings, degraded=False)) == {
        b"x-ratelimit-limit-requests": b"5",
        b"x-ratelimit-remaining-requests": b"4",
        b"x-ratelimit-reset-requests": b"3s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"10",
        b"x-ratelimit-reset-tokens": b"1m1s",
    }


def test_nothing_is_told_where_nothing_is_limited() -> None:
    assert limit_headers([], [], degraded=True) == []
    only_places = [Ceiling(ACME, Limits(concurrency=1))]
    headers = limit_headers(only_places, [Standing(0, 0, 1)], degraded=True)
    assert headers == [(b"x-forebay-limits", b"degraded")]


def test_what_is_over_its_limit_has_nothing_left_and_not_less() -> None:
    headers = dict(
        limit_headers([Ceiling(ACME, Limits(rpm=1))], [Standing(5, 0, 0)], degraded=False)
    )
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"


def test_a_wait_is_told_in_whole_seconds_and_never_too_short() -> None:
    error = refusal(Obstacle("requests", ACME, 60, 60, 1, 12.001), [(b"x-a", b"b")])
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.headers == {"retry-after": "13", "x-a": "b"}
    assert "60 requests per minute" in error.message


def test_who_would_wait_longer_than_clients_do_is_told_not_to_try() -> None:
    budget = Obstacle("budget", KEY, 5 * 10**9, 5 * 10**9, 1500, 86_000.5, "day")
    error = refusal(budget, [])
    assert error.code == "budget_exceeded"
    assert error.headers == {"retry-after": "86001", "x-should-retry": "false"}
    assert error.message == (
        "This key has a budget of $5 per day, of which $5 is spent or set aside; this request may "
        "cost $0.0000015."
    )


def test_what_never_fits_has_no_time_to_wait_and_names_limit_and_demand() -> None:
    error = refusal(Obstacle("tokens", ACME, 100, 0, 508, None), [])
    assert (error.status, error.code) == (429, "request_exceeds_limit")
    assert error.headers == {"x-should-retry": "false"}
    assert "100 tokens per minute" in error.message
    assert "508" in error.message
    dear = refusal(Obstacle("budget", ACME, 10**9, 0, 2 * 10**9, None, "month"), [])
    assert "$1 per month" in dear.message
    assert "$2" in dear.message


def test_places() -> None:
    error = refusal(Obstacle("concurrency", MODEL, 4, 4, 1, 0.2), [])
    assert error.code == "concurrency_limit_exceeded"
    assert error.headers["retry-after"] == "1"
    assert "with this model" in error.message
