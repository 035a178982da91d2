"""A gateway that runs nothing itself, before servers that speak vLLM's API, well and badly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.e2e.client import AC_KEY, ACME_KEY, CHAT, Client
from tests.e2e.conftest import KEYS, SECRETS, TENANTS
from tests.e2e.gateway_process import GatewayProcess, eventually
from tests.gateway.remote.upstream import (
    Script,
    Upstream,
    answers,
    breaks_after,
    in_turn,
    streams,
    whole,
)

UPSTREAM_KEY = "sk-upstream-7hG4kD2sW9qP"
TEXT = "one two three four five six"


class Servers:
    """Two scripted servers on a thread of their own."""

    def __init__(self) -> None:
        self.all = [Upstream(), Upstream()]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Servers:
        self._thread.start()
        self._scope = AsyncExitStack()
        for server in self.all:
            self._run(self._scope.enter_async_context(server.serve()))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._scope.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def say(self, *scripts: Script) -> None:
        """Answer so from now on, whichever server is asked."""
        turns = in_turn(*scripts)
        for server in self.all:
            server.received.clear()
            server.scripts = [turns]

    @property
    def bodies(self) -> list[dict]:
        """What they were sent."""
        return [received.body for server in self.all for received in server.received]

    def _run(self, what) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as servers:
        yield servers


@pytest.fixture(scope="module")
def before_them(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    listed = ", ".join(
        f'{{url: "{server.url}", engine: vllm, model: served, api_key_env: UPSTREAM_KEY}}'
        for server in servers.all
    )
    config = f"""
server: {{port: PORT, log_level: debug, log_format: json}}
models: [{{name: m, remote: [{listed}]}}]
{TENANTS}
"""
    directory = tmp_path_factory.mktemp("remote")
    environ = KEYS | SECRETS | {"UPSTREAM_KEY": UPSTREAM_KEY}
    with GatewayProcess(directory, config, environ) as process:
        yield process.until_ready()


@pytest.fixture
def acme_before_them(before_them: GatewayProcess) -> Iterator[Client]:
    with httpx.Client(base_url=before_them.url, timeout=30, verify=False) as http:
        yield Client(http, ACME_KEY)


def chat(**fields: object) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def test_a_stream_and_an_answer_come_through(servers: Servers, acme_before_them: Client) -> None:
    servers.say(streams(TEXT), answers(200, whole("Hello")))
    stream = acme_before_them.stream(CHAT, chat(stream_options={"include_usage": True}))
    assert (stream.text(), stream.done, stream.finish_reasons()) == (TEXT, True, ["stop"])
    assert stream.events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert stream.headers["x-forebay-replica"].startswith("m/127.0.0.1:")
    answer = acme_before_them.whole(CHAT, chat())
    assert answer["model"] == "m"
    assert answer["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize("how", ["reset", "close", "garbage", "error event"])
def test_a_stream_whose_server_is_lost_goes_on(
    servers: Servers, before_them: GatewayProcess, acme_before_them: Client, how: str
) -> None:
    servers.say(breaks_after(3, TEXT, how), streams(TEXT))
    stream = acme_before_them.stream(CHAT, chat())
    assert (stream.text(), stream.done, stream.finish_reasons()) == (TEXT, True, ["stop"])
    assert len(servers.bodies) == 2
    before_them.until_idle()


def test_tenants_are_kept_apart(
    servers: Servers, before_them: GatewayProcess, acme_before_them: Client
) -> None:
    servers.say(answers(200, whole()))
    salts = []
    for key, fields in (
        (ACME_KEY, {}),
        (ACME_KEY, {}),
        (AC_KEY, {}),
        (AC_KEY, {"cache_salt": "x"}),
        (ACME_KEY, {"cache_salt": "x"}),
    ):
        servers.say(answers(200, whole()))
        Client(acme_before_them.http, key).whole(CHAT, chat(**fields))
        [body] = servers.bodies
        salts.append(body["cache_salt"])
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4


def test_nothing_that_is_secret_is_said(
    servers: Servers, before_them: GatewayProcess, acme_before_them: Client
) -> None:
    hosts = [server.url.removesuffix("/v1") for server in servers.all]
    refusal = {"error": {"message": f"{hosts[0]} knows {UPSTREAM_KEY}", "code": 400}}
    servers.say(answers(400, refusal))
    answer = acme_before_them.post(CHAT, chat())
    assert answer.status_code == 400
    assert UPSTREAM_KEY not in answer.text
    assert hosts[0].removeprefix("http://") not in answer.text
    servers.say(breaks_after(1, TEXT), breaks_after(1, "other"), streams("no"))
    broken = acme_before_them.stream(CHAT, chat())
    assert not broken.done
    assert broken.finish_reasons() == []
    assert broken.events[-1]["error"]["type"] == "server_error"
    eventually(lambda: "lost a request" in before_them.output, 5)
    said = before_them.output + before_them.metrics().text
    assert UPSTREAM_KEY not in said
    assert ACME_KEY not in said
    before_them.until_idle()
