"""Two gateways before the same four servers, with one Redis between them that comes and goes. The
servers are scripted; each remembers the prompts that it has seen, and is slow with others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tests.cache.valkey import Valkey, running_valkey
from tests.e2e.client import AC_KEY, ACME_KEY, CHAT, Client, chat
from tests.e2e.conftest import KEYS, SECRETS, TENANTS
from tests.e2e.fleet_stage import Operator, caller, reading, told
from tests.e2e.gateway_process import GatewayProcess, eventually
from tests.e2e.tiers import prose
from tests.gateway.remote.upstream import Received, Upstream, chunk, sse, usage_chunk, words

SERVERS = 4
PREFIXES = 12
ANSWER = "one two three four five six seven eight"
PROMPT_TOKENS = 300
COLD_S, WARM_S = 0.1, 0.005
"""Until a server's first token."""
WAIT = "Take your time."
NEWS_S = 10.0
"""For news to come through, also when Redis has just come back."""


class Servers:
    """Four of them. Answers to prompts that end with `WAIT` are held after their first words until
    they are let go."""

    def __init__(self, portal: BlockingPortal, scope: ExitStack) -> None:
        self._portal = portal
        self._gate = asyncio.Event()
        self.seen = Counter[tuple[str, int]]()
        """How often each prompt came to each server."""
        self._upstreams = [Upstream([self._script(number)]) for number in range(SERVERS)]
        for upstream in self._upstreams:
            scope.enter_context(portal.wrap_async_context_manager(upstream.serve()))

    def settings(self) -> str:
        """For a gateway's configuration."""
        return ", ".join(
            f'{{url: "{upstream.url}", model: served, shared_cache: accept}}'
            for upstream in self._upstreams
        )

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Such answers wait until `let_go`, or until the scope ends."""
        self._portal.call(self._gate.clear)
        try:
            yield
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Let all answers come to their end."""
        self._portal.call(self._gate.set)

    def asked_for(self, prompt: str) -> list[int]:
        """The servers that this prompt came to."""
        return [number for asked, number in self.seen if asked == prompt]

    def _script(self, number: int) -> Any:
        async def script(received: Received) -> None:
            [message] = received.body["messages"]
            prompt = message["content"].removesuffix(WAIT)
            cached = PROMPT_TOKENS - 1 if self.seen[prompt, number] else 0
            self.seen[prompt, number] += 1
            await asyncio.sleep(WARM_S if cached else COLD_S)
            await received.begin_stream()
            pieces = [sse(chunk("", role=True)), *(sse(chunk(word)) for word in words(ANSWER))]
            for piece in pieces[:7]:
                await received.piece(piece)
            if message["content"].endswith(WAIT):
                await self._gate.wait()
            for piece in pieces[7:]:
                await received.piece(piece)
            await received.piece(sse(chunk(finish="stop")))
            usage = usage_chunk(PROMPT_TOKENS, len(words(ANSWER)), cached)
            await received.piece(sse(usage, "[DONE]"))
            await received.end_stream()

        return script


class TwoGateways:
    """The second is started when it is first needed."""

    def __init__(self, directory: Path, valkey: Valkey, servers: Servers, scope: ExitStack) -> None:
        self.valkey = valkey
        self.servers = servers
        self._directory = directory
        self._scope = scope
        self._second: GatewayProcess | None = None
        self.first = self._start("first").until_ready()

    @property
    def second(self) -> GatewayProcess:
        if self._second is None:
            self._second = self._start("second").until_ready()
        return self._second

    @property
    def both(self) -> tuple[GatewayProcess, GatewayProcess]:
        return self.first, self.second

    def until_all_is_quiet(self) -> None:
        """All servers serve, and neither gateway has anything on any of them."""
        for gateway in self.both:
            Operator(gateway).until_serving(SERVERS)
            Operator(gateway).until_nothing_is_left()

    def _start(self, name: str) -> GatewayProcess:
        config = f"""
server: {{port: PORT, log_format: json}}
redis: {{url: "{self.valkey.url}"}}
models: [{{name: m, remote: [{self.servers.settings()}]}}]
{TENANTS}
"""
        process = GatewayProcess(self._directory / name, config, KEYS | SECRETS)
        return self._scope.enter_context(process)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoGateways]:
    directory = tmp_path_factory.mktemp("two-gateways")
    with ExitStack() as scope:
        portal = scope.enter_context(start_blocking_portal())
        servers = Servers(portal, scope)
        valkey = scope.enter_context(running_valkey(directory))
        yield TwoGateways(directory, valkey, servers, scope)


def body(prompt: str) -> dict[str, Any]:
    return chat(prompt, stream_options={"include_usage": True})


def ask(gateway: GatewayProcess, prompt: str, key: str = ACME_KEY) -> str:
    """Which server answered; the answer must be whole."""
    with caller(gateway) as http:
        streamed = Client(http, key).stream(CHAT, body(prompt))
    whole = told(streamed)
    assert (whole.text, whole.finish_reasons, whole.model) == (ANSWER, ["stop"], "m")
    return streamed.headers["x-forebay-replica"]


def until_warm(gateway: GatewayProcess, prompt: str, server: str) -> None:
    """Until the gateway knows who has this prompt, and that nobody else has."""
    operator = Operator(gateway)
    asked = body(prompt)
    eventually(
        lambda: [name for name, warm in operator.warm(asked).items() if warm] == [server],
        NEWS_S,
        lambda: str(operator.explain(asked)),
        every_s=0.05,
    )


@contextmanager
def redis_is(how: str, valkey: Valkey) -> Iterator[None]:
    """Frozen or killed, until the scope ends."""
    if how == "frozen":
        valkey.freeze()
    else:
        valkey.kill()
    try:
        yield
    finally:
        if how == "frozen":
            valkey.thaw()
        else:
            valkey.start()


def test_a_prefix_goes_to_the_same_server_whichever_gateway_is_asked(stage: TwoGateways) -> None:
    prompts = [prose(f"{number} of the first", 200) for number in range(PREFIXES)]
    server_of = {prompt: ask(stage.first, prompt) for prompt in prompts}
    assert len(set(server_of.values())) > 1
    # the second was not there when the first was asked
    for prompt, server in server_of.items():
        until_warm(stage.second, prompt, server)
        assert ask(stage.second, prompt) == server
    theirs = [prose(f"{number} of the second", 200) for number in range(PREFIXES)]
    server_of |= {prompt: ask(stage.second, prompt) for prompt in theirs}
    for prompt in theirs:
        until_warm(stage.first, prompt, server_of[prompt])
    for gateway in stage.both:
        for prompt, server in server_of.items():
            assert ask(gateway, prompt) == server
    assert [len(stage.servers.asked_for(prompt)) for prompt in server_of] == [1] * 2 * PREFIXES


def test_a_gateway_sees_what_the_other_has_put_on_a_server(stage: TwoGateways) -> None:
    stage.until_all_is_quiet()
    first, second = (Operator(gateway) for gateway in stage.both)
    held = [body(f"{number}: {prose(f'held {number}', 100)} {WAIT}") for number in range(8)]
    with reading(stage.first, held) as streams, stage.servers.holding():
        streams.until_begun()
        own = {name: each["own_load"]["running"] for name, each in first.replicas().items()}
        assert sum(own.values()) == len(held)

        def seen() -> dict[str, int]:
            return {name: each["load"]["running"] for name, each in second.replicas().items()}

        eventually(lambda: seen() == own, NEWS_S, lambda: f"{seen()} {own}")
        assert all(each["own_load"]["running"] == 0 for each in second.replicas().values())
        stage.servers.let_go()
        for each in streams.results():
            assert told(each).text == ANSWER
        eventually(lambda: set(seen().values()) == {0}, NEWS_S)


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_without_redis_both_serve(stage: TwoGateways, how: str) -> None:
    stage.until_all_is_quiet()
    known = prose(f"known before it was {how}", 200)
    server = ask(stage.first, known)
    until_warm(stage.second, known, server)
    held = [body(f"{number}: {prose(f'{how} {number}', 100)} {WAIT}") for number in range(4)]
    with (
        reading(stage.first, held, ACME_KEY) as ours,
        reading(stage.second, held, AC_KEY) as theirs,
        stage.servers.holding(),
    ):
        ours.until_begun()
        theirs.until_begun()
        with redis_is(how, stage.valkey):
            asked_s = time.monotonic()
            for gateway in stage.both:
                assert gateway.status_of("/health/ready") == 200
                for key in (ACME_KEY, AC_KEY):
                    ask(gateway, prose(f"{how}, {key}, {gateway.port}", 200), key)
                # what is known stays known
                assert ask(gateway, known) == server
            assert time.monotonic() - asked_s < 5
            stage.servers.let_go()
            for each in (*ours.results(), *theirs.results()):
                assert told(each).text == ANSWER
    news = prose(f"news after it was {how}", 200)
    until_warm(stage.second, news, ask(stage.first, news))
    stage.until_all_is_quiet()
    for gateway in stage.both:
        assert "Traceback" not in gateway.output
