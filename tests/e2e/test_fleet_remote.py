"""One gateway before two others that run the model: whose prefix goes where, and what becomes of
streams when one of them is killed, stands still or is stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.client import AC_KEY, ACME_KEY, COMPLETIONS, Client, completion
from tests.e2e.conftest import KEYS, SECRETS, TENANTS
from tests.e2e.fleet_stage import (
    STREAMS,
    Counted,
    Operator,
    Told,
    caller,
    reading,
    story,
    told,
)
from tests.e2e.gateway_process import GatewayProcess, eventually
from tests.e2e.tiers import prose

REMOTE_KEY = "sk-between-us-3vN8cQ1xZ6bT"
TOKENS = 600
STORIES = [story(number, TOKENS) for number in range(STREAMS)]
KEEP_ALIVE_S = 1


class RemoteFleet:
    """A gateway that runs nothing itself, and as many remotes as serve."""

    def __init__(self, directory: Path, tiny: Path, scope: ExitStack) -> None:
        self._directory = directory
        self._tiny = tiny
        self._scope = scope
        self._undisturbed: list[Told] = []
        self.remotes: dict[str, GatewayProcess] = {}
        """By the name that the gateway has for each."""
        first, second = self._start(), self._start()
        listed = ", ".join(str(self.settings(remote)) for remote in (first, second))
        config = f"""
server: {{port: PORT, log_format: json}}
models: [{{name: m, tokenizer: "{tiny}", remote: [{listed}]}}]
{TENANTS}
"""
        environ = KEYS | SECRETS | {"REMOTE_KEY": REMOTE_KEY}
        self.gateway = scope.enter_context(GatewayProcess(directory / "gateway", config, environ))
        self.gateway.until_ready()
        self.operator = Operator(self.gateway)

    def settings(self, remote: GatewayProcess) -> dict[str, Any]:
        """A remote as the gateway is told of it."""
        return {
            "url": f"{remote.url}/v1",
            "engine": "forebay",
            "api_key_env": "REMOTE_KEY",
            "model": "served",
        }

    def until_two_serve(self) -> None:
        """Let those go on that stand still, and replace those that have ended."""
        for name, remote in list(self.remotes.items()):
            remote.send(signal.SIGCONT)
            if remote.process.poll() is not None:
                del self.remotes[name]
                new = self._start()
                self.operator.ask("DELETE", f"/replicas/{name}?drain_s=0")
                body = {"model": "m", "remote": self.settings(new)}
                added = self.operator.ask("POST", "/replicas", body, 201)
                assert self.remotes[added["replica"]] is new
        self.operator.until_serving(2)
        assert set(self.operator.replicas()) == set(self.remotes)

    def undisturbed(self) -> list[Told]:
        """The stories as they are told when nothing happens."""
        if not self._undisturbed:
            with reading(self.gateway, STORIES) as streams:
                self._undisturbed = [told(each) for each in streams.results()]
        return self._undisturbed

    def busy_remote(self) -> str:
        """One that has streams in their middle, as the other has."""
        running = {n: each["own_load"]["running"] for n, each in self.operator.replicas().items()}
        assert all(running.values())
        return next(iter(running))

    def _start(self) -> GatewayProcess:
        config = f"""
server: {{port: PORT, log_format: json, keep_alive_s: {KEEP_ALIVE_S}}}
models:
  - {{name: served, path: "{self._tiny}", dtype: float32, max_context: 2048,
     replicas: {{threads: 1}}, cache: {{device: 32MiB, dram: 0}}}}
tenants: [{{id: gateways, keys: [{{env: REMOTE_KEY}}]}}]
"""
        remote = GatewayProcess(
            self._directory / f"remote-{time.monotonic_ns()}",
            config,
            SECRETS | {"REMOTE_KEY": REMOTE_KEY},
        )
        self._scope.enter_context(remote)
        self.remotes[f"m/127.0.0.1:{remote.port}"] = remote
        return remote


@pytest.fixture(scope="module")
def all_of_it(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[RemoteFleet]:
    with ExitStack() as scope:
        yield RemoteFleet(tmp_path_factory.mktemp("remote-fleet"), tiny, scope)


@pytest.fixture
def fleet(all_of_it: RemoteFleet) -> Iterator[RemoteFleet]:
    """Two remotes serve at the beginning of every test, and nothing is left of it in the end."""
    all_of_it.until_two_serve()
    yield all_of_it
    all_of_it.operator.until_nothing_is_left()
    for each in (all_of_it.gateway, *all_of_it.remotes.values()):
        assert "Traceback" not in each.output
        assert REMOTE_KEY not in each.output


@pytest.fixture
def http(fleet: RemoteFleet) -> Iterator[httpx.Client]:
    with caller(fleet.gateway) as http:
        yield http


def ask(client: Client, body: dict[str, Any]) -> tuple[str, int]:
    """Which remote answered, and how much of the prompt it had cached."""
    answer = client.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    assert whole["model"] == "m"
    assert whole["usage"]["completion_tokens"] == body["max_tokens"]
    cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer.headers["x-forebay-cached-tokens"] == str(cached)
    return answer.headers["x-forebay-replica"], cached


def cached_tokens(gateway: GatewayProcess) -> float:
    """Prompt tokens that have come from a cache, by this gateway's own count."""
    return gateway.metrics().total("forebay_cached_tokens_total")


def test_a_prefix_goes_where_it_is_warm(fleet: RemoteFleet, http: httpx.Client) -> None:
    client = Client(http, ACME_KEY)
    first, second = fleet.remotes
    before = Counted.at(fleet.gateway.metrics())
    cached_before = {
        name: cached_tokens(gateway)
        for name, gateway in {"m": fleet.gateway, **fleet.remotes}.items()
    }
    for name, other in ((first, second), (second, first)):
        # they differ from the first block on
        known = completion(prose(f"{other[-5:]} does not know", 60), max_tokens=1)
        with fleet.operator.drained(other):
            assert ask(client, known) == (name, 0)
        assert fleet.operator.warm(known) == {name: True, other: False}
        longer = known | {"prompt": known["prompt"] + " and so on", "max_tokens": 2}
        for body in (known, longer, known):
            where, cached = ask(client, body)
            assert where == name
            assert cached > 200
    Counted.since(before, fleet.gateway, 8)
    counted = [
        cached_tokens(gateway) - cached_before[name]
        for name, gateway in {"m": fleet.gateway, **fleet.remotes}.items()
    ]
    assert counted[0] == sum(counted[1:]) > 0


def test_tenants_stay_apart_on_a_remote(fleet: RemoteFleet, http: httpx.Client) -> None:
    acme, ac = Client(http, ACME_KEY), Client(http, AC_KEY)
    first, second = fleet.remotes
    secret = completion(prose("a secret", 60), max_tokens=1)
    with fleet.operator.drained(second):
        assert ask(acme, secret) == (first, 0)
        assert ask(acme, secret)[1] > 200
        assert fleet.operator.warm(secret, "acme") == {first: True}
        assert fleet.operator.warm(secret, "ac") == {first: False}
        assert ask(ac, secret) == (first, 0)
        assert ask(ac, secret)[1] > 200


def test_connections_that_the_remote_is_about_to_close_lose_nothing(fleet: RemoteFleet) -> None:
    """A remote closes what has been idle for its keep-alive time, at the very moment at which the
    gateway may take it for the next request."""
    bodies = [completion(f"Number {i}", max_tokens=1) for i in range(STREAMS)]
    before = Counted.at(fleet.gateway.metrics())
    said_before = fleet.gateway.output

    def ask_now_and_then(number: int) -> None:
        with caller(fleet.gateway) as http:
            client = Client(http, ACME_KEY)
            for round_ in range(3):
                ask(client, bodies[number])
                offset_s = (number / STREAMS - 0.5) * 0.1 + round_ * 0.003
                time.sleep(KEEP_ALIVE_S + offset_s)

    with ThreadPoolExecutor(STREAMS) as threads:
        list(threads.map(ask_now_and_then, range(STREAMS)))
    Counted.since(before, fleet.gateway, 3 * STREAMS)
    said = fleet.gateway.output
    assert said.count("lost a request") == said_before.count("lost a request")


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL])
def test_streams_outlive_a_lost_remote(fleet: RemoteFleet, how: signal.Signals) -> None:
    expected = fleet.undisturbed()
    # whose seed is none of the client's
    unseeded = {name: value for name, value in STORIES[3].items() if name != "seed"}
    before = Counted.at(fleet.gateway.metrics())
    with reading(fleet.gateway, [*STORIES, unseeded]) as streams:
        streams.until_begun()
        lost = fleet.busy_remote()
        remote = fleet.remotes[lost]
        remote.send(how)
        if how is signal.SIGTERM:
            # what is asked in the meantime goes elsewhere
            with caller(fleet.gateway) as http:
                late = completion("Asked while one remote ends", max_tokens=1)
                for _ in range(10):
                    assert ask(Client(http, ACME_KEY), late)[0] in fleet.remotes
        eventually(lambda: fleet.operator.lost() == lost, 20)
        explained = fleet.operator.explain(STORIES[0])
        assert list(explained["passed_by"]) == [lost]
        assert explained["chosen"] != lost
        assert fleet.gateway.status_of("/health/ready") == 200
        *results, last = streams.results()
    assert [told(each) for each in results] == expected
    assert told(last).completion_tokens == TOKENS
    late_ones = 10 if how is signal.SIGTERM else 0
    counted = Counted.since(before, fleet.gateway, STREAMS + 1 + late_ones)
    assert counted.generated_tokens == (STREAMS + 1) * TOKENS + late_ones
    moved = [
        decisions
        for decisions in map(fleet.operator.decisions, streams.so_far)
        if len(decisions) > 1
    ]
    assert len(moved) == counted.failovers
    if how is signal.SIGTERM:
        assert remote.exit_code() == 0
        assert not moved
        return
    assert moved
    for first, *_, final in moved:
        assert (first["chosen"], final["moved_from"]) == (lost, lost)
        assert (first["outcome"]["lost"] is None, final["outcome"]["lost"]) == (False, None)
    remote.send(signal.SIGCONT)
