"""Exchanges with Redis that are pipelined, bounded in time, and not ended by who asks leaving."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import NoScriptError

from cache.redis_client import Command, drop_connections, pipelined
from gateway.limits.script import SCRIPT

_MOST_AT_ONCE = 32
_HELD_UP_S = 0.01
"""A timer that comes so late says that the event loop was held up, and not Redis."""
_CANCEL_AGAIN_S = 0.1


class _Asked:
    __slots__ = ("answer", "command", "on_unclaimed")

    def __init__(
        self,
        command: Command,
        answer: asyncio.Future[Any],
        on_unclaimed: Callable[[], None] | None,
    ) -> None:
        self.command = command
        self.answer = answer
        self.on_unclaimed = on_unclaimed

    def resolve(self, answer: Any) -> None:
        """An answer, or the error instead of one."""
        if self.answer.cancelled():
            if self.on_unclaimed is not None:
                self.on_unclaimed()
        elif self.answer.done():
            return  # timed out
        elif isinstance(answer, BaseException):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class LimitsLink:
    """One exchange at a time. A command goes out at once, or with all others that have come until
    the exchange before is over; they are carried out in the order in which they were asked.

    An exchange that takes longer than `timeout_s` fails with TimeoutError, and its connection is
    dropped. Whatever waits for its turn when an exchange fails, fails with it: one wait is enough.
    """

    def __init__(self, client: Redis | RedisCluster, *, timeout_s: float) -> None:
        """The client's own time limits should be longer."""
        self._client = client
        self._timeout_s = timeout_s
        self._waiting: deque[_Asked] = deque()
        self._running: asyncio.Task[list[Any]] | None = None
        self._overdue = False  # the one that is running

    def ask(
        self, command: Command, on_unclaimed: Callable[[], None] | None = None
    ) -> asyncio.Future[Any]:
        """The answer to come, or `cache.redis_client.TROUBLE`.

        `on_unclaimed` is called once the exchange is over, however it ended, if the future was
        cancelled by then: the command may have been carried out.
        """
        answer = asyncio.get_running_loop().create_future()
        if not self._waiting:
            # not at once: what is asked in the same moment goes along
            asyncio.get_running_loop().call_soon(self._pump)
        self._waiting.append(_Asked(command, answer, on_unclaimed))
        return answer

    async def disconnect(self) -> None:
        """Drop the client's connections, while nobody asks anything; see `drop_connections`."""
        await drop_connections(self._client, in_use=True)

    async def connect(self, command: Command, timeout_s: float) -> None:
        """Make the connection, which may take longer than an exchange, and try a command on it.
        Raises TROUBLE."""
        while self._running is not None:  # one that is being ended
            await asyncio.wait([self._running])
        # a task of its own: redis's client may swallow a cancellation (Python 3.11's wait_for),
        # and who connects must end when it is told to
        task = self._running = asyncio.create_task(self._send([command]))
        task.add_done_callback(self._connected)
        try:
            await asyncio.wait([task], timeout=timeout_s)
        finally:
            task.cancel()
        if not task.done():
            raise TimeoutError
        (answer,) = task.result()
        if isinstance(answer, BaseException):
            raise answer

    async def close(self) -> None:
        """End what is under way."""
        while self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running], timeout=_CANCEL_AGAIN_S)

    def _connected(self, task: asyncio.Task[list[Any]]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # who connects has seen it, or does not want to know
        self._pump()

    def _pump(self) -> None:
        if self._running is not None or not self._waiting:
            return
        batch = [self._waiting.popleft() for _ in range(min(_MOST_AT_ONCE, len(self._waiting)))]
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._send([each.command for each in batch]))
        due_s = loop.time() + self._timeout_s
        loop.call_at(due_s, self._due, task, batch, due_s)
        self._running = task
        task.add_done_callback(partial(self._ended, batch))

    def _due(self, task: asyncio.Task[list[Any]], batch: list[_Asked], due_s: float) -> None:
        """Its time is over. Where the event loop was held up, the answer may be there, unread, or
        nothing has been sent yet: the exchange gets its time once more."""
        if task.done():
            return
        loop = asyncio.get_running_loop()
        if loop.time() - due_s > _HELD_UP_S:
            loop.call_later(self._timeout_s, self._due, task, batch, float("inf"))
            return
        task.cancel()
        self._overdue = True
        self._fail_waiting(TimeoutError())
        for asked in batch:
            if not asked.answer.done():
                asked.answer.set_exception(TimeoutError())

    def _ended(self, batch: list[_Asked], task: asyncio.Task[list[Any]]) -> None:
        self._running = None
        error: BaseException | None = TimeoutError() if task.cancelled() else task.exception()
        if error is not None and not self._overdue:
            self._fail_waiting(error)
        self._overdue = False
        answers = task.result() if error is None else [error] * len(batch)
        for asked, answer in zip(batch, answers, strict=True):
            asked.resolve(answer)
        self._pump()

    def _fail_waiting(self, error: BaseException) -> None:
        waiting = list(self._waiting)
        self._waiting.clear()
        for asked in waiting:
            asked.resolve(error)

    async def _send(self, commands: list[Command]) -> list[Any]:
        """Answers and refusals, in order. A script that is not there is sent along."""
        answers: list[Any] = []
        await pipelined(self._client, commands, answers.append)
        unknown = [at for at, each in enumerate(answers) if isinstance(each, NoScriptError)]
        if unknown:
            again: list[Any] = []
            whole: list[Command] = [("EVAL", SCRIPT, *commands[at][2:]) for at in unknown]
            await pipelined(self._client, whole, again.append)
            for at, answer in zip(unknown, again, strict=True):
                answers[at] = answer
        return answers
