"""One gateway over two worker processes: lost ones, hung ones, added and removed ones, a stop; no
client notices any of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import ACME_KEY, COMPLETIONS, Client, completion
from tests.e2e.conftest import KEYS, SECRETS
from tests.e2e.fleet_stage import (
    PATIENCE_S,
    STREAMS,
    Counted,
    Operator,
    Told,
    caller,
    exists,
    reading,
    story,
    told,
    worker_pids,
)
from tests.e2e.gateway_process import GatewayProcess, eventually
from tests.e2e.tiers import prose

TOKENS = 800
STORIES = [story(number, TOKENS) for number in range(STREAMS)]


class Fleet:
    """A gateway over two workers; started again for the test after one that has ended it."""

    def __init__(self, directory: Path, tiny: Path) -> None:
        self._directory = directory
        self._tiny = tiny
        self._gateway: GatewayProcess | None = None
        self._undisturbed: list[Told] = []

    @property
    def gateway(self) -> GatewayProcess:
        """Ready."""
        if self._gateway is None or self._gateway.process.poll() is not None:
            self.close()
            environ = KEYS | SECRETS
            self._gateway = GatewayProcess(self._directory, self._config(2), environ)
            self._gateway.until_ready()
        return self._gateway

    def close(self) -> None:
        """Kill it. Idempotent."""
        if self._gateway is not None:
            self._gateway.__exit__(None, None, None)
            self._gateway = None

    def undisturbed(self) -> list[Told]:
        """The stories as they are told when nothing happens."""
        if not self._undisturbed:
            with reading(self.gateway, STORIES) as streams:
                self._undisturbed = [told(each) for each in streams.results()]
        return self._undisturbed

    def reload(self, count: int) -> None:
        """Ask for so many replicas."""
        config = self._config(count).replace("PORT", str(self.gateway.port))
        (self._directory / "forebay.yaml").write_text(config)
        self.gateway.send(signal.SIGHUP)

    def _config(self, count: int) -> str:
        return f"""
server: {{port: PORT, log_format: json}}
redis: {{url: off}}
routing: {{recovery_s: 60}}
models:
  - {{name: m, path: "{self._tiny}", dtype: float32, max_context: 2048,
     replicas: {{kind: process, count: {count}, threads: 1, hang_s: 1}},
     cache: {{device: 32MiB, dram: 0}}}}
tenants:
  - {{id: acme, keys: [{{env: ACME_KEY}}], limits: {{concurrency: {STREAMS}}}}}
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), tiny)
    yield fleet
    fleet.close()


@pytest.fixture
def gateway(fleet: Fleet) -> Iterator[GatewayProcess]:
    """Two workers serve at the beginning of every test, and nothing is left of it in the end."""
    gateway = fleet.gateway
    operator = Operator(gateway)
    operator.until_serving(2)
    yield gateway
    if gateway.process.poll() is None:
        operator.until_nothing_is_left()
        assert "Traceback" not in gateway.output


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_outlive_a_lost_worker(
    fleet: Fleet, gateway: GatewayProcess, how: signal.Signals
) -> None:
    expected = fleet.undisturbed()
    operator = Operator(gateway)
    warm = completion(prose(f"warm {how}", 60), max_tokens=1)
    before = Counted.at(gateway.metrics())
    with reading(gateway, STORIES) as streams:
        streams.until_begun()
        pids = worker_pids(gateway)
        running = {name: each["own_load"]["running"] for name, each in operator.replicas().items()}
        os.kill(pids[0], how)
        eventually(lambda: operator.lost() is not None, 10)
        lost = operator.lost()
        assert lost is not None
        # its part of the directory is gone with it
        passed_by = operator.explain(warm)["passed_by"]
        assert list(passed_by) == [lost]
        assert passed_by[lost].startswith(("down", "starting"))
        assert gateway.status_of("/health/ready") == 200
        results = streams.results()
    assert [told(each) for each in results] == expected
    counted = Counted.since(before, gateway, STREAMS)
    assert counted.prompt_tokens == sum(each.prompt_tokens for each in expected)
    assert counted.generated_tokens == STREAMS * TOKENS
    assert 0 < counted.failovers <= running[lost]
    moved = [
        decisions
        for decisions in map(operator.decisions, results)
        if decisions[-1]["moved_from"] is not None
    ]
    assert len(moved) == counted.failovers
    for first, second in moved:
        assert (first["chosen"], second["moved_from"]) == (lost, lost)
        assert first["outcome"]["lost"] is not None
        assert first["outcome"]["ttft_ms"] is not None
        assert second["outcome"]["lost"] is None
    operator.until_nothing_is_left()
    operator.until_serving(2)
    assert not exists(pids[0])


def test_a_replica_that_comes_back_is_neither_taken_for_warm_nor_herded(
    gateway: GatewayProcess,
) -> None:
    operator = Operator(gateway)
    replicas = list(operator.conditions())
    with caller(gateway) as http:
        client = Client(http, ACME_KEY)
        known = {name: completion(prose(f"{name} has it", 60), max_tokens=1) for name in replicas}
        for name, other in zip(replicas, replicas[::-1], strict=True):
            with operator.drained(other):
                client.whole(COMPLETIONS, known[name])
            expected = {name: True, other: False}
            eventually(lambda known=known[name], e=expected: operator.warm(known) == e, 5)

        os.kill(worker_pids(gateway)[0], signal.SIGKILL)
        eventually(lambda: operator.lost() is not None, 10)
        lost = operator.lost()
        assert lost is not None
        [other] = {*replicas} - {lost}
        explained = operator.explain(known[lost])
        assert explained["chosen"] == other
        assert explained["passed_by"][lost].startswith(("down", "starting"))
        assert operator.warm(known[lost]) == {other: False}
        operator.until_serving(2)
        assert operator.warm(known[lost]) == {lost: False, other: False}
        # what the other has is still asked of it
        assert operator.warm(known[other]) == {lost: False, other: True}
        assert operator.explain(known[other])["chosen"] == other
        usage = client.whole(COMPLETIONS, known[other])["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    cold = [completion(f"{i} is cold. " + prose(f"cold {i}"), max_tokens=1) for i in range(STREAMS)]
    with reading(gateway, cold) as streams:
        chosen = [each.headers["x-forebay-replica"] for each in streams.results()]
    assert 2 <= chosen.count(lost) <= STREAMS - 2, chosen


def test_with_every_worker_lost_readiness_says_so_and_streams_wait(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    expected = fleet.undisturbed()
    with reading(gateway, STORIES) as streams:
        streams.until_begun()
        for pid in worker_pids(gateway):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: gateway.status_of("/health/ready") == 503, 5)
        with caller(gateway) as http:
            ready = http.get("/health/ready")
        assert ready.json()["reason"] == "no replica of m serves"
        assert gateway.status_of("/health/live") == 200
        results = streams.results()
    assert [told(each) for each in results] == expected
    assert gateway.status_of("/health/ready") == 200


def test_replicas_come_and_go_while_streams_run(fleet: Fleet, gateway: GatewayProcess) -> None:
    expected = fleet.undisturbed()
    operator = Operator(gateway)
    first, second = operator.conditions()
    with reading(gateway, STORIES) as streams:
        streams.until_begun()
        fleet.reload(1)
        eventually(lambda: list(operator.conditions()) == [first], PATIENCE_S)
        assert [told(each) for each in streams.results()] == expected
    with reading(gateway, STORIES) as streams:
        streams.until_begun()
        added = operator.ask("POST", "/replicas", {"model": "m"}, 201)["replica"]
        assert added == second  # the first name that is free
        # a reload that is about something else leaves it
        fleet.reload(1)
        eventually(lambda: gateway.output.count("config reloaded") >= 2, 10)
        assert list(operator.conditions()) == [first, added]
        assert [told(each) for each in streams.results()] == expected
    with reading(gateway, STORIES) as streams:
        streams.until_begun()
        # what still runs there at once moves on
        removed = operator.ask("DELETE", f"/replicas/{first}?drain_s=0")
        assert removed == {"replica": first, "removed": True}
        assert list(operator.conditions()) == [added]
        assert [told(each) for each in streams.results()] == expected
    assert len(worker_pids(gateway)) == 1
    fleet.reload(2)
    operator.until_serving(2)


def test_a_stop_ends_streams_and_workers(fleet: Fleet, gateway: GatewayProcess) -> None:
    expected = fleet.undisturbed()[:5]
    pids = worker_pids(gateway)
    assert len(pids) == 2
    with reading(gateway, STORIES[:5]) as streams:
        streams.until_begun()
        gateway.send(signal.SIGTERM)
        eventually(lambda: gateway.status_of("/health/ready") == 503, 2)
        assert [told(each) for each in streams.results()] == expected
    assert gateway.exit_code() == 0
    assert not [pid for pid in pids if exists(pid)]
    assert "Traceback" not in gateway.output
