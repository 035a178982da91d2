"""A relay in front of a server's unix socket: over TCP, TLS or a socket of its own, as slow as a
test wants, and cutting off what a client sends when a test wants."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Relay:
    """Forwards connections to 127.0.0.1:`port`, or to the socket `listen`, to what is the `target`
    when they are made; answers wait `delay_s`.

    From when `cut_bytes` is set, a connection may send so many bytes more; of what it sends beyond,
    a part is passed on, `was_cut` is set, and nothing is read from it any more.
    """

    def __init__(
        self, target: Path, tls: ssl.SSLContext | None = None, listen: Path | None = None
    ) -> None:
        self.delay_s = 0.0
        self.cut_bytes: int | None = None
        self.was_cut = threading.Event()
        self.port = 0
        self.target = target
        self._listen = listen
        self._tls = tls
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="relay")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        if self._listen is not None:
            server: asyncio.Server = await asyncio.start_unix_server(self._accept, self._listen)
        else:
            server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
            self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        await asyncio.sleep(0)  # in which what was aborted is closed

    def _accept(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        """Forward a connection, which ends with its task, however early that is."""

        def over(task: asyncio.Task[None]) -> None:
            client_out.transport.abort()
            self._tasks.discard(task)

        task = self._loop.create_task(self._forward(client_in, client_out))
        self._tasks.add(task)
        task.add_done_callback(over)

    async def _forward(
        self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter
    ) -> None:
        try:
            server_in, server_out = await asyncio.open_unix_connection(self.target)
        except OSError:
            return  # nobody is there
        pumps = (
            asyncio.ensure_future(self._pump(client_in, server_out, delayed=False)),
            asyncio.ensure_future(self._pump(server_in, client_out, delayed=True)),
        )
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server_out.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, delayed: bool
    ) -> None:
        sent_bytes = 0
        while data := await source.read(1 << 20):
            if delayed and self.delay_s:
                await asyncio.sleep(self.delay_s)
            if not delayed and self.cut_bytes is not None:
                sent_bytes += len(data)
                if sent_bytes > self.cut_bytes:
                    sink.write(data[: len(data) // 2])
                    await sink.drain()
                    self.was_cut.set()
                    await asyncio.Event().wait()
            sink.write(data)
            await sink.drain()


@contextmanager
def relaying(
    target: Path, tls: ssl.SSLContext | None = None, listen: Path | None = None
) -> Iterator[Relay]:
    relay = Relay(target, tls, listen)
    relay.start()
    try:
        yield relay
    finally:
        relay.stop()
