"""Publishes events as a vLLM does, and answers for those that it keeps; loses some on request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from tests.cache.fake_vllm import message

END = (1 << 64) - 1


class FakePublisher:
    """An async scope. Told apart from a vLLM only by knowing when somebody has subscribed."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        folder: Path,
        *,
        kept: int = 100,
        topic: bool = True,
        ipv6: bool = False,
    ) -> None:
        """`topic`: whether answers have the topic, as they do in later versions. `ipv6`: on ports
        of ::1, which the machine must have."""
        self.endpoint = f"ipc://{folder}/events"
        self.replay_endpoint = f"ipc://{folder}/replay"
        self.number = 0
        self.requests: list[int] = []
        self.lost_answers: set[int] = set()
        """Of the next request's answers, those with these numbers do not arrive."""
        self.answers_end = True
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._context = context
        self._ipv6 = ipv6
        self._topic = [b"topic"] if topic else []
        self._scope = AsyncExitStack()

    async def __aenter__(self) -> FakePublisher:
        async with AsyncExitStack() as scope:
            self.socket = self._context.socket(zmq.XPUB)
            scope.callback(self.socket.close, linger=0)
            self.endpoint = self._bind(self.socket, self.endpoint)
            self._router = self._context.socket(zmq.ROUTER)
            scope.callback(self._router.close, linger=0)
            self.replay_endpoint = self._bind(self._router, self.replay_endpoint)
            answering = asyncio.create_task(self._answer())
            scope.push_async_callback(asyncio.wait, [answering])
            scope.callback(answering.cancel)
            self._scope = scope.pop_all()
        return self

    def _bind(self, socket: zmq.asyncio.Socket, endpoint: str) -> str:
        """Where it listens in the end."""
        socket.ipv6 = self._ipv6
        if not self._ipv6:
            socket.bind(endpoint)
            return endpoint
        return f"tcp://[::1]:{socket.bind_to_random_port('tcp://[::1]')}"

    async def __aexit__(self, *_: object) -> None:
        await self._scope.aclose()

    async def subscribed(self) -> None:
        """Wait for a subscription that has not been waited for."""
        async with asyncio.timeout(5):
            assert await self.socket.recv() == b"\x01"

    async def publish(self, events: Sequence[dict[str, Any]], *, lost: bool = False) -> None:
        """The next message; if it is `lost` it can only be asked for."""
        await self.publish_payload(message(events), lost=lost)

    async def publish_payload(self, payload: bytes, *, lost: bool = False) -> None:
        number, self.number = self.number, self.number + 1
        self._kept.append((number, payload))
        if not lost:
            await self.socket.send_multipart([b"topic", number.to_bytes(8, "big"), payload])

    def begin_again(self) -> None:
        """Count from the beginning, behind the same connections."""
        self.number = 0
        self._kept.clear()

    async def _answer(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            assert len(frames) == 3
            client, empty, first = frames
            assert empty == b""
            self.requests.append(int.from_bytes(first, "big"))
            lost, self.lost_answers = self.lost_answers, set()
            for number, payload in list(self._kept):
                if number >= self.requests[-1] and number not in lost:
                    await self._send(client, number, payload)
            if self.answers_end:
                await self._send(client, END, b"")

    async def _send(self, client: bytes, number: int, payload: bytes) -> None:
        topic = [b""] if self._topic and number == END else self._topic
        await self._router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
