"""The command in this thread, against a fake server on a loop of its own in another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from typer.testing import CliRunner

from loadtest.cli.main import app
from tests.loadtest.fake_server import Behaviour, Call, FakeServer, Reply, answer_well, fake_server

KEY = "sk-nobody-may-read-this"
_PATIENCE_S = 5.0


async def answer(call: Call, reply: Reply) -> None:
    """A server with one model, which answers as it is asked and shows no metrics."""
    if call.path == "/v1/models":
        await reply.whole(200, b'{"data": [{"id": "the-model"}]}')
    elif call.method == "GET":
        await reply.whole(404, b"{}")
    else:
        await answer_well(call, reply)


@contextmanager
def served(behave: Behaviour = answer) -> Iterator[FakeServer]:
    """A server until the end of the scope."""
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    found: list[FakeServer] = []

    async def serve() -> None:
        async with fake_server(behave) as server:
            found.append(server)
            ready.set()
            await stop.wait()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(_PATIENCE_S)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_PATIENCE_S)


def url(server: FakeServer) -> str:
    return f"http://127.0.0.1:{server.endpoint.port}/v1"


def asked(server: FakeServer) -> list[Call]:
    """The completions that it was asked for."""
    return [call for call in server.calls if call.method == "POST"]


def command(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code, and all that was printed."""
    settings = {"FOREBAY_API_KEY": "", "FOREBAY_STATE_DIR": "/nowhere", "COLUMNS": "200"}
    settings |= environment
    result = CliRunner().invoke(app, arguments, env=settings)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


SMALL = ("-w", "unique", "-s", "prompt_tokens=20", "-s", "output_tokens=2")
"""A workload that is soon sent."""
