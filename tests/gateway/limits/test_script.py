"""The script counts as the book does, by the server's time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gateway.limits.calls import (
    Adopt,
    BudgetPart,
    Operation,
    Release,
    Renew,
    ReserveAnswer,
    Sender,
    Settle,
    Undo,
    account_name,
    apply_arguments,
    read_apply,
    read_reserve,
    reserve_arguments,
)
from gateway.limits.script import SCRIPT, keys_of
from gateway.limits.seeds import Seed
from policies.limit_account import Holding
from policies.limit_book import Granted, LimitBook, Refused, Unseeded
from policies.limit_periods import period_start_s
from policies.limit_standing import AccountId, BudgetId, Ceiling
from policies.limit_window import WindowShape
from policies.limits import Demand, Limits
from tests.cache.valkey import running_valkey

SHAPE = WindowShape(60_000, 12)
LIMITS = Limits(rpm=6, tpm=100, concurrency=4, budget_nusd=10**15, budget_per="day")
KEY_LIMITS = Limits(rpm=4, tpm=70, concurrency=2)
SPENT = 10**15 - 500
TENANTS = itertools.count()


class Conversation:
    """Calls of the script by one gateway, for a tenant of its own."""

    def __init__(self, client: redis.Redis, shape: WindowShape = SHAPE) -> None:
        self.client = client
        self.tenant = f"tenant-{next(TENANTS)}"
        self.accounts = (AccountId(self.tenant), AccountId(self.tenant, "key", "key-1"))
        self.sender = Sender("gateway", shape, 30.0)
        self.generation = 1
        self._numbers = itertools.count(1)

    def reserve(
        self,
        request: str,
        ceilings: list[Ceiling],
        demand: Demand,
        seeds: dict[BudgetId, Seed] | None = None,
    ) -> ReserveAnswer:
        rest = reserve_arguments(request, ceilings, demand, seeds or {}, 0.0)
        return read_reserve(self.call("reserve", *rest))

    def apply(
        self, *operations: Operation, number: int | None = None, before: int = 0
    ) -> list[Any]:
        number = next(self._numbers) if number is None else number
        return self.call("apply", *apply_arguments(number, before, None, operations, 0.0))

    def call(self, verb: str, *rest: Any) -> list[Any]:
        command = self.sender.call(self.tenant, verb, self.generation, *rest)
        answer: list[Any] = self.client.execute_command(*command)
        return answer

    def fields(self) -> dict[str, str]:
        found: Any = self.client.hgetall(keys_of(self.tenant)[0])
        return {name.decode(): value.decode(errors="replace") for name, value in found.items()}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    directory: Path = tmp_path_factory.mktemp("valkey")
    with running_valkey(directory) as server, server.client() as client:
        client.script_load(SCRIPT)
        yield client


RESERVE = st.tuples(
    st.just("reserve"), st.booleans(), st.integers(0, 30), st.integers(0, 40), st.integers(0, 150)
)
SETTLE = st.tuples(st.just("settle"), st.integers(0, 5), st.integers(0, 60), st.integers(0, 200))
RELEASE = st.tuples(st.just("release"), st.integers(0, 5))
WAIT = st.tuples(st.just("wait"), st.sampled_from([0.002, 0.01, 0.03]))


# traces that depend on the time of day do not shrink
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.one_of(RESERVE, RESERVE, SETTLE, RELEASE, WAIT), min_size=5, max_size=30))
def test_the_same_trace_has_the_same_end(client: redis.Redis, trace: list[tuple[Any, ...]]) -> None:
    talk = Conversation(client)
    book = LimitBook(SHAPE)
    running: list[tuple[str, Holding, tuple[BudgetPart, ...]]] = []
    for number, (verb, *values) in enumerate(trace):
        if verb == "reserve":
            with_key, tokens, more, cost = values
            ceilings = [Ceiling(talk.accounts[0], LIMITS)]
            if with_key:
                ceilings.append(Ceiling(talk.accounts[1], KEY_LIMITS))
            demand = Demand(tokens, tokens + more, cost, cost + more)
            start_s = period_start_s("day", time.time())
            budget = BudgetId(talk.accounts[0], "day", start_s)
            answer = talk.reserve(f"r{number}", ceilings, demand, {budget: Seed(SPENT, 0.0)})
            now_s = answer.unix_s + 5e-7  # the middle of the microsecond
            result = book.reserve(ceilings, demand, now_s, now_s)
            if isinstance(result, Unseeded):
                book.seed(budget, SPENT, now_s)
                result = book.reserve(ceilings, demand, now_s, now_s)
            if answer.status == "granted":
                assert isinstance(result, Granted)
                assert result.holding.tokens == answer.tokens
                assert result.holding.cost_nusd == answer.cost_nusd
                part = BudgetPart("t", "d", start_s)
                running.append((f"r{number}", result.holding, (part,)))
            else:
                assert answer.status == "refused"
                assert isinstance(result, Refused)
            for ours, theirs in zip(result.standings, answer.standings, strict=True):
                assert ours[:5] == theirs[:5]
                for wait in ("requests_wait_s", "tokens_wait_s"):
                    assert getattr(ours, wait) == pytest.approx(getattr(theirs, wait), abs=1e-5)
                # what was undone does not bring the script's back
                assert ours.reset_s - 1e-5 <= theirs.reset_s <= 0.065 + 1e-5
        elif verb == "wait":
            time.sleep(values[0])
        elif running and verb == "settle":
            request, holding, parts = running[values[0] % len(running)]
            if book.settle(holding, values[1], values[2]):
                talk.apply(Settle(request, values[1], values[2], 0.0, parts))
        elif running:
            request, holding, _ = running.pop(values[0] % len(running))
            applied = talk.apply(Release(request) if holding.settled else Undo(request))
            book.release(holding, applied[2] / 1e6)


def test_large_numbers_stay_exact(client: redis.Redis) -> None:
    talk = Conversation(client)
    limit = 9 * 10**15
    ceilings = [Ceiling(talk.accounts[0], Limits(budget_nusd=limit, tpm=10**9))]
    budget = BudgetId(talk.accounts[0], "month", period_start_s("month", time.time()))
    seeds = {budget: Seed(limit - 3, 0.0)}
    for number in range(3):
        assert talk.reserve(f"{number}", ceilings, Demand(1, 1, 1, 1), seeds).status == "granted"
    answer = talk.reserve("3", ceilings, Demand(1, 1, 1, 1), seeds)
    assert answer.status == "refused"
    assert answer.standings[0].spent_nusd == limit
    assert talk.fields()["t|m$"] == str(limit)


def test_asking_twice_counts_once(client: redis.Redis) -> None:
    talk = Conversation(client)
    ceilings = [Ceiling(talk.accounts[0], Limits(rpm=2, tpm=100))]
    first = talk.reserve("same", ceilings, Demand(5, 50))
    again = talk.reserve("same", ceilings, Demand(5, 50))
    assert (first.tokens, again.tokens) == (50, 50)
    assert again.standings[0][:3] == (1, 50, 1)


def test_a_batch_that_comes_twice_or_late_is_applied_once(client: redis.Redis) -> None:
    talk = Conversation(client)
    ceilings = [Ceiling(talk.accounts[0], Limits(rpm=5, tpm=100))]
    for request in ("a", "b"):
        talk.reserve(request, ceilings, Demand(5, 20))
    talk.apply(Undo("a"), number=7)
    for number in (7, 6):
        assert read_apply(talk.apply(Undo("b"), number=number)).status == "applied"
    assert talk.reserve("c", ceilings, Demand(1, 1)).standings[0][:3] == (2, 21, 2)


def test_no_batch_is_passed_over(client: redis.Redis) -> None:
    talk = Conversation(client)
    ceilings = [Ceiling(talk.accounts[0], Limits(rpm=5))]
    for request in ("a", "b"):
        talk.reserve(request, ceilings, Demand(1, 1))
    assert read_apply(talk.apply(Undo("b"), number=8, before=7)).status == "gap"
    assert read_apply(talk.apply(Undo("a"), number=7)).status == "applied"
    assert talk.fields()["t|n"] == "1"
    assert read_apply(talk.apply(Undo("b"), number=8, before=7)).status == "applied"
    assert talk.fields()["t|n"] == "0"


def test_what_was_under_way_before_an_outage_comes_to_nothing_after_it(
    client: redis.Redis,
) -> None:
    talk = Conversation(client)
    ceilings = [Ceiling(talk.accounts[0], Limits(rpm=5))]
    talk.generation = 2
    talk.apply(Undo("late"))
    talk.generation = 1
    assert talk.reserve("late", ceilings, Demand(1, 1)).status == "stale"
    talk.generation = 2
    assert talk.reserve("new", ceilings, Demand(1, 1)).standings[0].requests == 1


def test_a_batch_for_another_epoch_changes_nothing(client: redis.Redis) -> None:
    talk = Conversation(client)
    ceilings = [Ceiling(talk.accounts[0], Limits(rpm=5))]
    first = talk.reserve("a", ceilings, Demand(1, 1))
    answer = read_apply(talk.call("apply", *apply_arguments(1, 0, "gone", [Undo("a")], 0.0)))
    assert (answer.status, answer.epoch) == ("lost", first.epoch)
    assert talk.reserve("b", ceilings, Demand(1, 1)).standings[0].requests == 2


@pytest.mark.parametrize("ahead", [3, 500])
def test_a_clock_that_is_set_back_gives_nothing_away(client: redis.Redis, ahead: int) -> None:
    shape = WindowShape()
    talk = Conversation(client, shape)
    ceilings = [Ceiling(talk.accounts[0], Limits(rpm=2, tpm=100))]
    for request in ("a", "b"):
        assert talk.reserve(request, ceilings, Demand(10, 10)).status == "granted"
    key = keys_of(talk.tenant)[0]
    fields = talk.fields()
    for name in ("h", "l"):
        client.hset(key, f"t|{name}", str(int(fields[f"t|{name}"]) + ahead))
    for name in [each for each in fields if each[:3] in ("t|n", "t|u") and each[3:]]:
        client.hdel(key, name)
        client.hset(key, name[:3] + str(int(name[3:]) + ahead), fields[name])
    refused = talk.reserve("c", ceilings, Demand(10, 10))
    assert refused.status == "refused"
    assert 59 < refused.standings[0].requests_wait_s <= 61
    talk.apply(Undo("a"), Undo("b"))
    assert talk.reserve("d", ceilings, Demand(10, 10)).standings[0][:3] == (1, 10, 1)


def test_sweeping_leaves_what_counts_and_removes_the_rest(client: redis.Redis) -> None:
    talk = Conversation(client)
    ceilings = [
        Ceiling(talk.accounts[0], LIMITS),
        Ceiling(AccountId(talk.tenant, "model", "odd|h"), Limits(rpm=5)),
    ]
    budget = BudgetId(talk.accounts[0], "day", period_start_s("day", time.time()))
    talk.reserve("a", ceilings, Demand(1, 1, 1, 1), {budget: Seed(0, 0.0)})
    assert talk.call("sweep") == [b"kept"]
    assert talk.fields()["m:odd|h|n"] == "1"
    talk.apply(Settle("a", 1, 1, 0.0, ()), Release("a"))
    time.sleep(0.08)
    assert talk.call("sweep") == [b"kept"]
    assert sorted(talk.fields()) == ["e", "g|gateway", "t|d$", "t|d@", "t|d^"]
    key = keys_of(talk.tenant)[0]
    client.hset(key, mapping={"t|d@": "86400", "g|gateway": "1 1 1000"})
    assert talk.call("sweep") == [b"gone"]
    assert not client.exists(*keys_of(talk.tenant))


def test_no_key_can_be_evicted_and_a_tenant_is_one_slot(client: redis.Redis) -> None:
    talk = Conversation(client)
    talk.reserve("a", [Ceiling(talk.accounts[0], Limits(rpm=5))], Demand(1, 1))
    for key in keys_of(talk.tenant):
        assert client.ttl(key) == -1
        assert f"{{{talk.tenant}}}" in key
    assert account_name(talk.accounts[1]) == "k:key-1"


def test_a_request_that_ends_in_the_batch_that_renews_it_has_ended(client: redis.Redis) -> None:
    talk = Conversation(client)
    ceilings = [Ceiling(talk.accounts[0], Limits(concurrency=5))]
    talk.reserve("a", ceilings, Demand(1, 1))
    adopted = Adopt("b", True, 0.0, 1, 1, False, (BudgetPart("t"),), frozenset({"t"}))
    talk.apply(Renew(("a",)), Undo("a"), adopted, Renew(("b", "c")), Undo("b"))
    assert client.zcard(keys_of(talk.tenant)[1]) == 0
    assert talk.fields()["t|c"] == "0"
