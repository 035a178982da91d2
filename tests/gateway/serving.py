"""A server process with nothing behind it, to test how it starts and stops.

Run as `python -m tests.gateway.serving CONFIG [load-seconds | fail | refuse | crash]`.
`/stream?ticks=N` sends a line every 20 ms, N times, then `[DONE]`, or `error` as soon as its model
is closed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError
from gateway.cli.main import _complain
from gateway.lifecycle import Lifecycle
from gateway.listening import PortUnavailable
from gateway.load_progress import ReportProgress
from gateway.named_cache_store import MemoryStore
from gateway.reload import ConfigSource
from gateway.server import serve
from gateway.settings_errors import ConfigError

BEHAVIOUR = sys.argv[2] if len(sys.argv) > 2 else "0"


class FakeModel:
    """Closed when its fleet is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = asyncio.Event()


class FakeFleet:
    """One model, and nothing that a reload could change."""

    def __init__(self) -> None:
        self.named_store = MemoryStore()

    async def apply(self, settings: Any) -> None:
        pass


@asynccontextmanager
async def open_fleet(
    settings: Any, *, models: Any, progress: ReportProgress, **_: Any
) -> AsyncIterator[FakeFleet]:
    await asyncio.to_thread(load, progress)
    model = FakeModel(settings.models[0].name)
    models.add(model)
    yield FakeFleet()
    model.closed.set()
    sys.stdout.write("fleet closed\n")


def load(progress: ReportProgress) -> None:
    if BEHAVIOUR == "fail":
        raise ModelLoadError("weights.gguf: is cut off after 3 bytes")
    if BEHAVIOUR == "refuse":
        raise ConfigError(["redis/lock: is held by process 1", "redis: has another secret"])
    if BEHAVIOUR == "crash":
        raise ZeroDivisionError
    steps = int(float(BEHAVIOUR) / 0.02)
    for done in range(steps):
        progress("weights", done, steps)
        time.sleep(0.02)


def make_app(*, models: Mapping[str, Any], lifecycle: Lifecycle, metrics: Any, **_: Any) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def answer(status: int, body: bytes) -> None:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": body})

        path = scope["path"]
        if path == "/health/live":
            await answer(200, b"live")
        elif path == "/metrics":
            await answer(200, metrics.render())
        elif not lifecycle.ready:
            await answer(503, lifecycle.phase.encode())
        elif path == "/health/ready":
            await answer(200, b"ready")
        else:
            with lifecycle.request():
                await stream(int(scope["query_string"].removeprefix(b"ticks=")), send)

    async def stream(ticks: int, send: Any) -> None:
        [model] = models.values()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(ticks):
            try:
                async with asyncio.timeout(0.02):
                    await model.closed.wait()
            except TimeoutError:
                await send({"type": "http.response.body", "body": b"tick\n", "more_body": True})
            else:
                await send({"type": "http.response.body", "body": b"error\n"})
                return
        await send({"type": "http.response.body", "body": b"[DONE]\n"})

    return app


def main() -> int:
    source = ConfigSource(Path(sys.argv[1]), os.environ, {})
    try:
        return serve(source, open_fleet=open_fleet, make_app=make_app)
    except ConfigError as error:
        return _complain(2, *error.messages)
    except PortUnavailable as error:
        return _complain(3, str(error))


if __name__ == "__main__":
    code = main()
    gc.freeze()  # as the command does
    sys.exit(code)
