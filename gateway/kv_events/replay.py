"""Asking a publisher for messages that were missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from time import monotonic

import zmq
import zmq.asyncio

from gateway.kv_events.frames import Numbered, replayed, request
from gateway.kv_events.sockets import connect, open_socket


@dataclass(frozen=True, slots=True)
class ReplayTimes:
    """Seconds until a replay is given up: without another message, and in all."""

    silence_s: float = 3.0
    all_s: float = 60.0


USUAL_TIMES = ReplayTimes()
"""A publisher may look for requests only between messages, every 0.1 seconds."""


async def replay(
    context: zmq.asyncio.Context, endpoint: str, first: int, times: ReplayTimes
) -> AsyncGenerator[Numbered, None]:
    """The messages from number `first` on that are still kept, oldest first.

    Ends early, without an error, where the publisher does not answer (in time), or answers what
    cannot be read. Has a connection of its own, so that late answers to one request are never taken
    for those to another.
    """
    deadline_s = monotonic() + times.all_s
    with open_socket(context, zmq.DEALER) as socket:
        connect(socket, endpoint)
        await socket.send_multipart(request(first))
        while True:
            rest_s = min(times.silence_s, deadline_s - monotonic())
            try:
                async with asyncio.timeout(rest_s):
                    frames = await socket.recv_multipart()
            except TimeoutError:
                return
            message = replayed(frames)
            if message is None or message.ends_replay:
                return
            yield message
